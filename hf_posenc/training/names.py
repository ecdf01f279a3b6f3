"""The names that options and functions share; nothing is imported here, since wrong words are refused at once."""

from __future__ import annotations

from typing import Literal

Trained = Literal["full", "lora", "encoding"]
PROMPTED = ("endprompt", "endprompt_random")
DRAWN = ("pose", "random", "random_float", "cream", *PROMPTED)
POSITIONS = ("contiguous", "packed", *DRAWN)
