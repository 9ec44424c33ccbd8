"""The key of the server is in nothing that is kept or shown, whole or in part."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_locust.secret import blotted, without_credentials

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


@pytest.mark.parametrize(
    "text",
    [
        "vllm serve m --api-key {} --port 1",
        "vllm serve m --api-key={} --port 1",
        "vllm serve m --api-key \\\n  {} --port 1",
        "HF_TOKEN={} vllm serve m",
        "HUGGING_FACE_HUB_TOKEN='{}' vllm serve m",
        "AWS_SECRET_ACCESS_KEY={}",
        'api_key: "{}"\nport: 1',
        '{{"api-key": "{}", "port": 1}}',
        "password: {}",
        "Authorization: Bearer {}",
    ],
)
def test_a_value_that_is_named_as_a_secret_is_not_kept_and_all_else_is(text: str) -> None:
    assert without_credentials(text.format(SECRET)) == text.format("***")


def test_settings_that_only_sound_like_it_stay() -> None:
    begun = "vllm serve m --max-num-batched-tokens 8192 --tokenizer x --max-tokens=5 --key-value cache"
    assert without_credentials(begun) == begun
