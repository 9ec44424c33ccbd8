"""Both endpoints with mixed traffic: short questions, long documents, long answers."""

from vllm_locust import ChatUser, CompletionsUser


class MixedChat(ChatUser):
    """Three of four users talk to `/v1/chat/completions`."""

    scenario = "mixed"
    weight = 3


class MixedCompletions(CompletionsUser):
    """The fourth one uses `/v1/completions`."""

    scenario = "mixed"
    weight = 1
