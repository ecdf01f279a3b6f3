"""One HTML page from the results of many runs. It loads nothing, so it can be mailed, archived or printed."""

from hf_posenc.evaluation.page.collect import Collection, Source, Unfinished, collect
from hf_posenc.evaluation.page.render import render

__all__ = ["Collection", "Source", "Unfinished", "collect", "render"]
