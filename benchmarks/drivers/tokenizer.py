"""Makes a tokenizer of one token per byte, which tools that count tokens ask for; argument: the folder for it."""

import sys

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_END = "<|end|>"
_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def main() -> None:
    alphabet = [_END, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={text: number for number, text in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_END, bos_token=_END, pad_token=_END)
    fast.chat_template = _TEMPLATE
    fast.save_pretrained(sys.argv[1])


if __name__ == "__main__":
    main()
