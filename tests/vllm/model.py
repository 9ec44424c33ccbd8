"""Makes a model that vLLM serves on any CPU: a tiny Llama of random weights; argument: the folder for it.

Run by the Python of vLLM's venv; makes the same at every run. The tokenizer is a byte-level BPE trained on the packaged
prompts; it knows `<think>` and `</think>`, for vLLM's reasoning parsers.
"""

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

_PROMPTS = Path(__file__).parent.parent.parent / "scenarios" / "prompts"
_BEGIN, _END, _THINK = "<|begin|>", "<|end|>", ("<think>", "</think>")
_POSITIONS = 4096
_TEMPLATE = (
    "{% for message in messages %}<|begin|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant\n{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    texts = [str(path) for path in sorted(_PROMPTS.glob("*.jsonl"))]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = [_BEGIN, _END, *_THINK]
    bpe.train(
        texts,
        trainers.BpeTrainer(vocab_size=2048, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=_BEGIN, eos_token=_END, pad_token=_END, model_max_length=_POSITIONS
    )
    fast.chat_template = _TEMPLATE
    return fast


def main() -> None:
    folder = sys.argv[1]
    words = tokenizer()
    words.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=_POSITIONS,
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)


if __name__ == "__main__":
    main()
