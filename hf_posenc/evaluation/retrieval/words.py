"""Words for the keys of needles: 95 adjectives and 98 nouns, in pairs such as `quiet-harbor`.

RULER takes its adjectives and nouns from the `wonderwords` package. These lists are our own and fixed, so that a prompt
does not change with another package's version.
"""

from __future__ import annotations

from hf_posenc.evaluation.retrieval.draws import Draws

_ADJECTIVES = """
    able amber ancient bitter bold brave brief bright broad broken calm careful clean clear clever cold common cool
    curious daily damp dark deep dense distant double dry dull eager early easy empty exact faint fair famous fast fine
    firm flat fresh frozen full gentle giant golden good grand gray happy hard heavy hidden high hollow honest huge
    humble icy idle jolly keen kind large late lazy light little lonely long loud lucky mellow mild modest narrow neat
    new noble odd old pale patient plain polite proud pure quick quiet rapid rare rich rough round royal
"""
_NOUNS = """
    acorn anchor apple arrow badge basket beach bell bench bird bottle branch bread bridge brush bucket butter button
    cabin camera candle canyon carpet castle chair cherry circle cliff clock cloud coast coffee comet copper corner
    cotton cradle creek curtain desert dragon drum eagle engine falcon feather fence field finger flame flower forest
    fountain garden gate glove guitar hammer harbor helmet hill honey island jacket jewel kettle ladder lake lantern
    leaf lemon letter lion market meadow mirror mountain needle ocean orchard oven paper pebble pencil piano pillow
    planet pocket pond rabbit ribbon river rocket saddle sailor shadow silver spoon
"""
ADJECTIVES, NOUNS = tuple(_ADJECTIVES.split()), tuple(_NOUNS.split())


def word_key(draws: Draws) -> str:
    """An adjective and a noun, joined by a hyphen as in RULER."""
    return f"{draws.choice(ADJECTIVES)}-{draws.choice(NOUNS)}"
