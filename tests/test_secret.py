"""The key of the server is in nothing that is kept or shown, whole or in part."""

from hypothesis import given
from hypothesis import strategies as st

from vllm_locust.secret import blotted

SECRET = "sk-most-secret-of-all"
WORDS = st.lists(st.sampled_from([SECRET, "sk-", "sk-most-", "a", " ", "***", SECRET[:12]]))


def test_a_key_is_blotted_out_wherever_and_however_often_it_stands() -> None:
    assert blotted(f"{SECRET} is no key, {SECRET}{SECRET}.", SECRET) == "*** is no key, ******."
    assert blotted("nothing of it here, sk- neither", SECRET) == "nothing of it here, sk- neither"


def test_so_is_one_that_was_cut_short_but_no_word_that_only_begins_like_it() -> None:
    for length in range(8, len(SECRET) + 1):
        assert blotted(f"your key is {SECRET[:length]}", SECRET) == "your key is ***"
    assert blotted("your key is sk-mo", SECRET) == "your key is sk-mo"


def test_without_a_key_a_text_stays_as_it_is() -> None:
    assert blotted("anything", None) == blotted("anything", "") == "anything"
    assert blotted("the key abc", "abc") == "the key ***"


@given(WORDS)
def test_nothing_that_tells_the_key_is_left(words: list[str]) -> None:
    shown = blotted("".join(words), SECRET)
    assert SECRET[:8] not in shown
