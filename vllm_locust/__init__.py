"""A Locust plugin that measures streaming LLM servers.

Public names are imported when they are first used: importing Locust patches the whole process, and
`vllm_locust.histogram` must be usable without that.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from vllm_locust.timeline import Outcome, Timeline
    from vllm_locust.users import ChatUser, CompletionsUser

__all__ = ["ChatUser", "CompletionsUser", "Outcome", "Timeline", "__version__"]

_WHERE = {
    "ChatUser": "vllm_locust.plugin",
    "CompletionsUser": "vllm_locust.plugin",
    "Outcome": "vllm_locust.timeline",
    "Timeline": "vllm_locust.timeline",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - any of the public names
    """Import a public name from its module (PEP 562); a user class brings the plugin with it."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415 - only when a name is used

    return getattr(import_module(_WHERE[name]), name)
