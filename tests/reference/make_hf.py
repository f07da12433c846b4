#!/usr/bin/env python3
"""Writes tiny Hugging Face folders as transformers saves them. Not needed to build or to test.

Runs in the environment of make_reference.py. Writes, for each case, hf/NAME/ (save_pretrained's
config.json, weights and, where they are several files, index) and hf/NAME.expected.safetensors: the
same weights in ZeroShard's names and layouts (common/plan/model_table.h), by torch's own transpose
and split.
"""

import pathlib
import shutil

import torch
import transformers
from safetensors.torch import save_file

HERE = pathlib.Path(__file__).resolve().parent / "hf"

SMALL = dict(vocab_size=25, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
             num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32,
             pad_token_id=None)
CASES = {
    # Tied, half precision, the bare model's names without "transformer.".
    "gpt2_bare": lambda: transformers.GPT2Model(transformers.GPT2Config(
        vocab_size=25, n_positions=12, n_embd=16, n_layer=2, n_head=2)).half(),
    # All biases, a head size of its own, several files.
    "llama_sharded": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(
        **SMALL, head_dim=16, attention_bias=True, mlp_bias=True, rope_theta=500000.0,
        rope_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                      "high_freq_factor": 4.0, "original_max_position_embeddings": 16})),
    # Biases on q, k and v; tied; bfloat16.
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(
        **SMALL, tie_word_embeddings=True)).bfloat16(),
}


def expected_gpt2(state):
    out = {n: state[n] for n in ("wte.weight", "wpe.weight", "ln_f.weight", "ln_f.bias")}
    for layer in range(2):
        h, b = f"h.{layer}.", f"blocks.{layer}."
        for kind in ("weight", "bias"):
            for norm in ("ln_1", "ln_2"):
                out[f"{b}{norm}.{kind}"] = state[f"{h}{norm}.{kind}"]
            parts = torch.chunk(state[f"{h}attn.c_attn.{kind}"], 3, dim=-1)
            for name, part in zip("qkv", parts):
                out[f"{b}attn.{name}.{kind}"] = part.t() if kind == "weight" else part
            out[f"{b}attn.proj.{kind}"] = state[f"{h}attn.c_proj.{kind}"]
            out[f"{b}mlp.fc.{kind}"] = state[f"{h}mlp.c_fc.{kind}"].t()
            out[f"{b}mlp.proj.{kind}"] = state[f"{h}mlp.c_proj.{kind}"]
    return out


def expected_llama(state, tied):
    out = {"embed.weight": state["model.embed_tokens.weight"],
           "norm_f.weight": state["model.norm.weight"]}
    if not tied:
        out["lm_head.weight"] = state["lm_head.weight"]
    for layer in range(2):
        m, b = f"model.layers.{layer}.", f"blocks.{layer}."
        out[f"{b}norm_1.weight"] = state[f"{m}input_layernorm.weight"]
        out[f"{b}norm_2.weight"] = state[f"{m}post_attention_layernorm.weight"]
        linears = {"attn.q": "self_attn.q_proj", "attn.k": "self_attn.k_proj",
                   "attn.v": "self_attn.v_proj", "attn.proj": "self_attn.o_proj",
                   "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj",
                   "mlp.down": "mlp.down_proj"}
        for ours, theirs in linears.items():
            weight = state[f"{m}{theirs}.weight"]
            out[f"{b}{ours}.weight"] = weight.t() if ours in ("attn.proj", "mlp.down") else weight
            if f"{m}{theirs}.bias" in state:
                out[f"{b}{ours}.bias"] = state[f"{m}{theirs}.bias"]
    return out


def main():
    shutil.rmtree(HERE, ignore_errors=True)
    for seed, (name, build) in enumerate(CASES.items(), start=1):
        torch.manual_seed(seed)
        model = build()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, dtype=torch.float32))
        if name == "gpt2_bare":
            values = expected_gpt2(model.state_dict())
        else:
            values = expected_llama(model.state_dict(), model.config.tie_word_embeddings)
        model.save_pretrained(HERE / name, max_shard_size="8KB" if "sharded" in name else "5GB")
        (HERE / name / "generation_config.json").unlink(missing_ok=True)
        save_file({k: v.detach().float().contiguous() for k, v in values.items()},
                  HERE / f"{name}.expected.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
