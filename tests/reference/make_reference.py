#!/usr/bin/env python3
"""Writes the reference values that the C++ tests compare with. Not needed to build or to test.

    python3 -m venv venv
    venv/bin/pip install torch==2.5.1 transformers==4.46.3 safetensors==0.8.0 numpy==2.4.6
    venv/bin/python tests/reference/make_reference.py

Each case is a tiny model of transformers with random weights, computed in float64, so that the
values are those of the formulas and not of one library's rounding (transformers' RMSNorm and
rotary angles are float32 whatever the model's type). Writes, beside this file:

  NAME.json         a job specification (proto/zeroshard/v1/job.proto): model, optimizer, schedule
  NAME.safetensors  F32 and I32, in ZeroShard's tensor names and layouts:
    initial/TENSOR    weights before training
    gradient/TENSOR   of the summed loss of the batch gradient.tokens at the initial weights
    final/TENSOR      weights after the last step
    gradient.tokens, gradient.targets [mb, T] (-1: no loss), gradient.loss [1] (summed)
    tokens, targets   [steps * batch, T]: step s trains on the rows from s * batch
    loss, grad_norm, learning_rate [steps]: of each step, from the mean loss over its tokens, the
                      norm before clipping
"""

import json
import math
import pathlib

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file

HERE = pathlib.Path(__file__).resolve().parent
VERSIONS = {"torch": "2.5.1", "transformers": "4.46.3"}

VOCAB = 257
SEQUENCE = 144  # crosses an attention tile of 128
STEPS = 20
WARMUP = 4
BATCH = 4
MICRO_BATCH = 2
LR, MIN_LR = 1e-2, 1e-3
BETAS, EPS, DECAY, CLIP = (0.9, 0.95), 1e-8, 0.1, 1.0

CASES = {
    "gpt2": dict(architecture="gpt2", hidden_size=32, layers=2, heads=2, sequence_length=SEQUENCE,
                 vocab_size=VOCAB),
    "llama": dict(architecture="llama", hidden_size=32, layers=2, heads=4, kv_heads=2,
                  intermediate_size=96, sequence_length=SEQUENCE, vocab_size=VOCAB),
    "llama_tied": dict(architecture="llama", hidden_size=32, layers=1, heads=4, kv_heads=1,
                       intermediate_size=64, sequence_length=SEQUENCE, vocab_size=VOCAB,
                       rope_theta=500.0, norm_epsilon=1e-6, tie_embeddings=True),
}


def build(spec):
    if spec["architecture"] == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=spec["vocab_size"], n_positions=spec["sequence_length"],
            n_embd=spec["hidden_size"], n_layer=spec["layers"], n_head=spec["heads"],
            activation_function="gelu_new", layer_norm_epsilon=1e-5,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="eager")
        return transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(
        vocab_size=spec["vocab_size"], hidden_size=spec["hidden_size"],
        intermediate_size=spec["intermediate_size"], num_hidden_layers=spec["layers"],
        num_attention_heads=spec["heads"], num_key_value_heads=spec["kv_heads"],
        max_position_embeddings=spec["sequence_length"],
        rms_norm_eps=spec.get("norm_epsilon", 1e-5), rope_theta=spec.get("rope_theta", 10000.0),
        tie_word_embeddings=spec.get("tie_embeddings", False), attention_bias=False,
        mlp_bias=False, pad_token_id=None, attn_implementation="eager")
    return transformers.LlamaForCausalLM(config)


def randomise(model, generator):
    """Weights large enough that a wrong head, mask or rotation shows, no bias zero, no gain one."""
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            if parameter.dim() == 2:
                parameter.copy_(noise * 0.2)
            else:
                parameter.add_(noise * 0.1)


def to_ours(model, architecture, values):
    """`values`: HF parameter name -> array. Ours by name: see common/plan/model_table.h."""
    out = {}
    for name, v in values.items():
        parts = name.split(".")
        if architecture == "gpt2":
            if parts[1] != "h":  # transformer.wte.weight, transformer.ln_f.bias
                out[".".join(parts[1:])] = v
                continue
            block = f"blocks.{parts[2]}."
            layer, kind = ".".join(parts[3:-1]), parts[-1]
            if layer == "attn.c_attn":  # Conv1D: [in, out], q, k and v side by side
                for part, piece in zip("qkv", np.split(v, 3, axis=-1)):
                    out[f"{block}attn.{part}.{kind}"] = piece.T if kind == "weight" else piece
            elif layer == "mlp.c_fc":
                out[f"{block}mlp.fc.{kind}"] = v.T if kind == "weight" else v
            elif layer in ("attn.c_proj", "mlp.c_proj"):  # [in, out], as ours
                out[f"{block}{layer.replace('c_proj', 'proj')}.{kind}"] = v
            else:
                out[f"{block}{layer}.{kind}"] = v
        else:
            if parts[1] != "layers":
                out[{"model.embed_tokens.weight": "embed.weight", "model.norm.weight":
                     "norm_f.weight", "lm_head.weight": "lm_head.weight"}[name]] = v
                continue
            block = f"blocks.{parts[2]}."
            ours, transposed = {
                "input_layernorm": ("norm_1", False),
                "post_attention_layernorm": ("norm_2", False),
                "self_attn.q_proj": ("attn.q", False),
                "self_attn.k_proj": ("attn.k", False),
                "self_attn.v_proj": ("attn.v", False),
                "self_attn.o_proj": ("attn.proj", True),
                "mlp.gate_proj": ("mlp.gate", False),
                "mlp.up_proj": ("mlp.up", False),
                "mlp.down_proj": ("mlp.down", True),
            }[".".join(parts[3:-1])]
            out[f"{block}{ours}.weight"] = v.T if transposed else v
    return {k: np.ascontiguousarray(v, dtype=np.float32) for k, v in out.items()}


def summed_loss(model, tokens, targets):
    logits = model(input_ids=torch.from_numpy(tokens).long()).logits
    return torch.nn.functional.cross_entropy(
        logits.double().view(-1, logits.shape[-1]), torch.from_numpy(targets).long().view(-1),
        ignore_index=-1, reduction="sum")


def samples(count, random):
    """Runs of T+1 tokens with something to learn: mostly a fixed successor, sometimes any token."""
    runs = np.zeros((count, SEQUENCE + 1), dtype=np.int32)
    runs[:, 0] = random.integers(0, VOCAB, count)
    for t in range(1, SEQUENCE + 1):
        surprise = random.random(count) < 0.05
        runs[:, t] = np.where(surprise, random.integers(0, VOCAB, count),
                              (runs[:, t - 1] * 5 + 3) % VOCAB)
    return np.ascontiguousarray(runs[:, :-1]), np.ascontiguousarray(runs[:, 1:])


def learning_rate(step):
    """Steps count from 1."""
    if step <= WARMUP:
        return LR * step / WARMUP
    done = (step - WARMUP) / (STEPS - WARMUP)
    return MIN_LR + 0.5 * (LR - MIN_LR) * (1 + math.cos(math.pi * done))


def train(model, tokens, targets):
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() != 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}],
        lr=LR, betas=BETAS, eps=EPS)
    curves = {"loss": [], "grad_norm": [], "learning_rate": []}
    for step in range(1, STEPS + 1):
        rows = slice((step - 1) * BATCH, step * BATCH)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        optimizer.zero_grad()
        loss = summed_loss(model, tokens[rows], targets[rows]) / (BATCH * SEQUENCE)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        curves["loss"].append(loss.item())
        curves["grad_norm"].append(norm.item())
        curves["learning_rate"].append(learning_rate(step))
    return {k: np.array(v, dtype=np.float32) for k, v in curves.items()}


def make(name, spec, seed):
    generator = torch.Generator().manual_seed(seed)
    random = np.random.default_rng(seed)
    model = build(spec).float()
    randomise(model, generator)
    model = model.double().eval()
    arrays = lambda: {k: p.detach().numpy().copy() for k, p in model.named_parameters()}
    gradients = lambda: {k: p.grad.detach().numpy().copy() for k, p in model.named_parameters()}
    ours = lambda prefix, values: {
        f"{prefix}/{k}": v for k, v in to_ours(model, spec["architecture"], values).items()}

    out = ours("initial", arrays())
    tokens, targets = samples(MICRO_BATCH, random)
    targets[0, 5] = targets[1, 130:140] = -1
    loss = summed_loss(model, tokens, targets)
    loss.backward()
    out.update(ours("gradient", gradients()))
    out["gradient.tokens"], out["gradient.targets"] = tokens, targets
    out["gradient.loss"] = np.array([loss.item()], dtype=np.float32)

    out["tokens"], out["targets"] = samples(STEPS * BATCH, random)
    out.update(train(model, out["tokens"], out["targets"]))
    out.update(ours("final", arrays()))
    save_file(out, HERE / f"{name}.safetensors", metadata={"format": "pt", **VERSIONS})

    job = {
        "name": name.replace("_", "-"), "model": spec, "steps": STEPS,
        "train_batch_size": BATCH, "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "optimizer": {"type": "AdamW", "params": {
            "lr": LR, "betas": list(BETAS), "eps": EPS, "weight_decay": DECAY}},
        "scheduler": {"type": "cosine", "params": {"warmup_steps": WARMUP, "min_lr": MIN_LR}},
        "gradient_clipping": CLIP,
    }
    (HERE / f"{name}.json").write_text(json.dumps(job, indent=2) + "\n")
    print(name, sum(p.numel() for p in model.parameters()), "parameters, loss",
          out["loss"][0], "to", out["loss"][-1], "norms", out["grad_norm"])


def main():
    for module, wanted in (("torch", torch.__version__.split("+")[0]),
                           ("transformers", transformers.__version__)):
        if wanted != VERSIONS[module]:
            raise SystemExit(f"{module} is {wanted}; wanted {VERSIONS[module]}, see the top of this file")
    torch.set_num_threads(1)
    for seed, (name, spec) in enumerate(CASES.items(), start=1):
        make(name, spec, seed)


if __name__ == "__main__":
    main()
