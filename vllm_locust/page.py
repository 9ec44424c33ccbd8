"""The page of charts: one file that holds everything that it needs, so it can be saved, sent, and opened offline.

Promise: it loads nothing, whatever is in it, and no text of a picture can become a part of the page.
"""

import json
import re
from functools import cache
from pathlib import Path

from vllm_locust import contrast
from vllm_locust import picture as pictures
from vllm_locust.comparison import Comparison
from vllm_locust.results import Run

ASSETS = Path(__file__).parent / "assets"
_SCRIPTS = ("uplot/uPlot.iife.min.js", "numbers.js", "charts.js", "paint.js", "chart.js", "contrast.js", "llm.js")
"""In this order one script, which begins by drawing."""
_PLACE = re.compile(r"/\*(css|js|picture)\*/")


def page(picture: str = "null") -> str:
    """Return the page of a picture, as JSON (see `vllm_locust.picture`), or one that asks Locust for its own."""
    # A `<` could end the element that the picture is in; within JSON it is only ever a part of a text.
    parts = {**_parts(), "picture": picture.replace("<", "\\u003c")}
    return _PLACE.sub(lambda place: parts[place[1]], _read("llm.html"))


def of_run(run: Run) -> str:
    """Return the page of a run that is over."""
    return page(json.dumps(pictures.of_run(run), allow_nan=False, separators=(",", ":")))


def of_comparison(found: Comparison) -> str:
    """Return the page of a comparison."""
    return page(json.dumps(contrast.of(found), allow_nan=False))


@cache
def _parts() -> dict[str, str]:
    return {
        "css": _read("uplot/uPlot.min.css") + _read("llm.css"),
        "js": "\n".join(map(_read, _SCRIPTS)),
    }


@cache
def _read(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")
