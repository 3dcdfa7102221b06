"""Random-weight Qwen2 models with a real tokenizer and chat template, built offline.

Owns: the model directory it writes (config, weights, tokenizer, template, stamp). Must never
download anything, and must never leave a half-written directory: it builds beside the target and
renames. The weights mean nothing; KV equality and timing do.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sam.testing.chat_template import CHAT_TEMPLATE

STAMP = "sam_tiny_model.json"
FORMAT = 2
_ONSETS = [*"bcdfghklmnprstvw", "st", "tr", "pl", "ch", "sh"]
_NUCLEI = [*"aeiou", "ai", "ou", "ee"]
_CODAS = ["", *"nrstl", "ck", "nd", "st", "ng"]
_COMMON_WORDS = ["the", "of", "and", "to", "in", "is", "for", "agent", "tool", "file", "read"]
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@dataclass(frozen=True)
class TinyModelSpec:
    """Shape of a model. `hidden` must be divisible by `heads`, `heads` by `kv_heads`."""

    layers: int = 2
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 352
    vocab: int = 2048
    context_length: int = 32768
    dtype: str = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.hidden % self.heads or self.heads % self.kv_heads:
            raise ValueError(f"hidden/heads/kv_heads do not divide: {self}")
        if (self.hidden // self.heads) % 2:
            raise ValueError(f"rotary embedding needs an even head size: {self}")
        if self.vocab < 512:
            raise ValueError("vocab must be at least 512: bytes, merges and special tokens")


PRESETS = {
    "tiny": TinyModelSpec(),
    "small": TinyModelSpec(
        layers=8, hidden=512, heads=8, kv_heads=4, intermediate=1408, vocab=4096
    ),
}


def build_tiny_model(path: str | Path, *, preset: str = "tiny", **overrides: Any) -> Path:
    """Build the model at `path`, or reuse it if its stamp says it is the same; return the path.

    `overrides` are fields of `TinyModelSpec`. Raises FileExistsError when `path` is a directory
    that this function did not build.
    """
    target, spec = Path(path), replace(PRESETS[preset], **overrides)
    stamp = _stamp(spec)
    if target.exists():
        found = target / STAMP
        if found.is_file() and json.loads(found.read_text()) == stamp:
            return target
        if not found.is_file() and any(target.iterdir()):
            raise FileExistsError(f"{target} is not a tiny model: choose another path")
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        os.chmod(work, 0o755)
        _write_model(work, spec)
        (work / STAMP).write_text(json.dumps(stamp, indent=1))
        if target.exists():
            shutil.rmtree(target)
        try:
            work.rename(target)
        except OSError:  # another process was faster
            if json.loads((target / STAMP).read_text()) != stamp:
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _stamp(spec: TinyModelSpec) -> dict[str, Any]:
    template = hashlib.sha256(CHAT_TEMPLATE.encode()).hexdigest()[:16]
    return {"format": FORMAT, "spec": asdict(spec), "template": template}


def _write_model(folder: Path, spec: TinyModelSpec) -> None:
    eos_id = _write_tokenizer(folder, spec)
    (folder / "config.json").write_text(json.dumps(_config(spec, eos_id), indent=1))
    generation = {"eos_token_id": eos_id, "pad_token_id": eos_id, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1))
    _write_weights(folder, spec)


def _config(spec: TinyModelSpec, eos_id: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "vocab_size": spec.vocab,
        "max_position_embeddings": spec.context_length,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "torch_dtype": spec.dtype,
        "eos_token_id": eos_id,
        "bos_token_id": None,
    }


def _write_weights(folder: Path, spec: TinyModelSpec) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(spec.seed)
    dtype = getattr(torch, spec.dtype)

    def normal(*shape: int, std: float) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * std).to(dtype)

    head_dim = spec.hidden // spec.heads
    widths = {"q": spec.heads * head_dim, "k": spec.kv_heads * head_dim}
    widths["v"] = widths["k"]
    std, one = spec.hidden**-0.5, torch.ones(spec.hidden, dtype=dtype)
    weights = {"model.embed_tokens.weight": normal(spec.vocab, spec.hidden, std=1.0)}
    for i in range(spec.layers):
        layer = f"model.layers.{i}."
        for name, width in widths.items():
            # Queries and keys are doubled: peaked attention, so that outputs show wrong KV.
            gain = 2.0 * std if name in "qk" else std
            weights[f"{layer}self_attn.{name}_proj.weight"] = normal(width, spec.hidden, std=gain)
            weights[f"{layer}self_attn.{name}_proj.bias"] = normal(width, std=0.02)
        weights[layer + "self_attn.o_proj.weight"] = normal(spec.hidden, widths["q"], std=std)
        for name in ("gate_proj", "up_proj"):
            weights[f"{layer}mlp.{name}.weight"] = normal(spec.intermediate, spec.hidden, std=std)
        weights[layer + "mlp.down_proj.weight"] = normal(
            spec.hidden, spec.intermediate, std=spec.intermediate**-0.5
        )
        weights[layer + "input_layernorm.weight"] = one.clone()
        weights[layer + "post_attention_layernorm.weight"] = one.clone()
    weights["model.norm.weight"] = one.clone()
    head = normal(spec.vocab, spec.hidden, std=std)
    # Logit 0 among thousands drawn from N(0, 1): a special token never is the greedy choice.
    head[-len(SPECIAL_TOKENS) :] = 0.0
    weights["lm_head.weight"] = head
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _write_tokenizer(folder: Path, spec: TinyModelSpec) -> int:
    """Byte-level BPE of exactly `vocab` entries, the special ones last; return the EOS id."""
    tokenizer = _train_tokenizer(spec.vocab - len(SPECIAL_TOKENS))
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    if tokenizer.get_vocab_size() != spec.vocab:
        size = tokenizer.get_vocab_size()
        raise RuntimeError(f"tokenizer has {size} entries, not {spec.vocab}")
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "model_max_length": spec.context_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    return tokenizer.token_to_id("<|im_end|>")


def _train_tokenizer(size: int) -> Any:
    """Trained `tokenizers.Tokenizer` of `size` entries, split as transformers splits for Qwen2.

    With another pre-tokenizer, clients (transformers) and server would disagree on tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    pattern = Qwen2Tokenizer(vocab={c: i for i, c in enumerate(alphabet)}, merges=[])
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = pattern.backend_tokenizer.normalizer
    tokenizer.pre_tokenizer = pattern.backend_tokenizer.pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_corpus(), trainer=trainer)
    fillers = size - tokenizer.get_vocab_size()
    tokenizer.add_tokens([f"<filler{i}>" for i in range(fillers)])
    return tokenizer


def _corpus() -> list[str]:
    """Deterministic text with words, code and JSON, enough to learn a few thousand merges."""
    rng = random.Random(20)
    words = [
        "".join(
            rng.choice(_ONSETS) + rng.choice(_NUCLEI) + rng.choice(_CODAS)
            for _ in range(rng.randint(1, 3))
        )
        for _ in range(3000)
    ]
    words += _COMMON_WORDS
    lines = []
    for i in range(4000):
        picked = [rng.choice(words) for _ in range(12)]
        lines.append(" ".join(picked).capitalize() + ".")
        if i % 5 == 0:
            lines.append(f"def {picked[0]}_{picked[1]}(self, {picked[2]}):\n    return {i}\n")
            lines.append(json.dumps({picked[3]: {"type": "string", "description": picked[4]}}))
            lines.append(f"user\nassistant\nsystem\ntool\n{i * 7919 % 100000}")
    return lines


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build a random-weight Qwen2 model.")
    parser.add_argument("path")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="tiny")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args(argv)
    print(build_tiny_model(args.path, preset=args.preset, seed=args.seed, dtype=args.dtype))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
