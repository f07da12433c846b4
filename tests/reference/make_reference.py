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
    logits [mb, positions, V], logits.positions: of that batch, at these positions
    tokens, targets   [steps * batch, T]: step s trains on the rows from s * batch
    gradient.document_start, document_start  of each token, where documents are masked from each
                      other: where in its row its document starts
    loss, grad_norm, learning_rate [steps]: of each step, from the mean loss over its tokens, the
                      norm before clipping

Dropout's masks are drawn here with a Philox generator of this file's own, after the layout that
worker/ops/dropout.h describes, and handed to transformers' model in place of its own. The gradient's
batch counts as step 0, samples 0 and 1.
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
    # Heads wider than the hidden size, biases everywhere, frequencies at both ends of llama3's
    # scaling and in its blend.
    "llama_biased": dict(architecture="llama", hidden_size=32, layers=2, heads=6, kv_heads=2,
                         head_dim=16, intermediate_size=72, sequence_length=SEQUENCE,
                         vocab_size=VOCAB, attention_bias=True, mlp_bias=True,
                         max_position_embeddings=512,
                         rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0,
                                           high_freq_factor=4.0,
                                           original_max_position_embeddings=256)),
    "qwen2": dict(architecture="llama", hidden_size=32, layers=1, heads=4, kv_heads=2,
                  intermediate_size=64, sequence_length=SEQUENCE, vocab_size=VOCAB, qkv_bias=True,
                  rope_theta=1000000.0, norm_epsilon=1e-6, tie_embeddings=True),
    "llama_documents": dict(architecture="llama", hidden_size=32, layers=1, heads=4, kv_heads=2,
                            intermediate_size=64, sequence_length=SEQUENCE, vocab_size=VOCAB,
                            max_position_embeddings=576,
                            rope_scaling=dict(rope_type="linear", factor=4.0)),
    "gpt2_documents": dict(architecture="gpt2", hidden_size=32, layers=1, heads=2,
                           sequence_length=SEQUENCE, vocab_size=VOCAB,
                           max_position_embeddings=160, tie_embeddings=False),
    "gpt2_dropout": dict(architecture="gpt2", hidden_size=32, layers=2, heads=2,
                         sequence_length=SEQUENCE, vocab_size=VOCAB, embd_pdrop=0.1,
                         attn_pdrop=0.2, resid_pdrop=0.15),
    "llama_dropout": dict(architecture="llama", hidden_size=32, layers=1, heads=4, kv_heads=2,
                          intermediate_size=64, sequence_length=SEQUENCE, vocab_size=VOCAB,
                          tie_embeddings=True, embd_pdrop=0.1, attn_pdrop=0.2, resid_pdrop=0.15),
}
DOCUMENTS = ("llama_documents", "gpt2_documents")
DROPOUT_SEED = 2**40 + 3  # beyond 32 bits
TORCHS_DROPOUT = torch.nn.functional.dropout
LOGIT_POSITIONS = [0, 1, 64, 127, 128, 143]


def build(spec):
    if spec["architecture"] == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=spec["vocab_size"],
            n_positions=spec.get("max_position_embeddings", spec["sequence_length"]),
            n_embd=spec["hidden_size"], n_layer=spec["layers"], n_head=spec["heads"],
            activation_function="gelu_new", layer_norm_epsilon=1e-5,
            tie_word_embeddings=spec.get("tie_embeddings", True),
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="eager")
        return transformers.GPT2LMHeadModel(config)
    common = dict(
        vocab_size=spec["vocab_size"], hidden_size=spec["hidden_size"],
        intermediate_size=spec["intermediate_size"], num_hidden_layers=spec["layers"],
        num_attention_heads=spec["heads"], num_key_value_heads=spec["kv_heads"],
        max_position_embeddings=spec.get("max_position_embeddings", spec["sequence_length"]),
        rms_norm_eps=spec.get("norm_epsilon", 1e-5), rope_theta=spec.get("rope_theta", 10000.0),
        tie_word_embeddings=spec.get("tie_embeddings", False), pad_token_id=None,
        attn_implementation="eager")
    if spec.get("qkv_bias"):
        return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**common))
    if "head_dim" in spec:
        common["head_dim"] = spec["head_dim"]
    config = transformers.LlamaConfig(
        attention_bias=spec.get("attention_bias", False), mlp_bias=spec.get("mlp_bias", False),
        rope_scaling=spec.get("rope_scaling"), **common)
    return transformers.LlamaForCausalLM(config)


def philox(counter, key):
    """Philox4x32-10 (Salmon et al. 2011) of arrays of counter words [4] and key words [2]."""
    c = [np.asarray(word, dtype=np.uint64) for word in counter]
    k = [np.uint64(word) for word in key]
    low = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        p0, p1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(p1 >> np.uint64(32)) ^ c[1] ^ k[0], p1 & low,
             (p0 >> np.uint64(32)) ^ c[3] ^ k[1], p0 & low]
        k = [(k[0] + np.uint64(0x9E3779B9)) & low, (k[1] + np.uint64(0xBB67AE85)) & low]
    return c


def dropout_factors(rate, seed, step, sample, site, shape):
    """0 or 1 / (1 - rate) for each element of one sample; worker/ops/dropout.h."""
    halves = lambda value: (value & 0xFFFFFFFF, value >> 32)
    stream = philox([*halves(step), *halves(sample)], halves(seed))
    size = math.prod(shape)
    block = np.arange((size + 3) // 4, dtype=np.uint64)
    words = philox([block & np.uint64(0xFFFFFFFF), block >> np.uint64(32),
                    stream[2] ^ np.uint64(site), stream[3]], stream[:2])
    words = np.stack(words, axis=1).reshape(-1)[:size]
    rate = float(np.float32(rate))
    kept = np.where(words >= rate * 2.0**32, 1 / (1 - rate), 0.0)
    return torch.from_numpy(kept.reshape(shape))


class Mask(torch.nn.Module):
    """In place of one of the model's Dropout modules: its factors, of samples from `sample` on."""
    step = sample = 0  # of all

    def __init__(self, rate, site):
        super().__init__()
        self.rate, self.site = rate, site

    def forward(self, x):
        return x * torch.stack([
            dropout_factors(self.rate, DROPOUT_SEED, Mask.step, Mask.sample + b, self.site,
                            x.shape[1:]) for b in range(x.shape[0])])


def hand_in_masks(model, spec):
    """Sites are numbered by unit, four a unit: worker/model/pass.h."""
    if spec["architecture"] == "llama":
        # Only the attention's weights have a dropout here, by a function; the other places are
        # GPT-2's. With one layer there is one site.
        assert spec["layers"] == 1
        after = lambda mask: lambda module, args, output: mask(output)
        weights = Mask(spec["attn_pdrop"], 4 + 1)
        torch.nn.functional.dropout = lambda x, **_: weights(x)
        model.model.embed_tokens.register_forward_hook(after(Mask(spec["embd_pdrop"], 0)))
        layer = model.model.layers[0]
        layer.self_attn.o_proj.register_forward_hook(after(Mask(spec["resid_pdrop"], 4 + 2)))
        layer.mlp.down_proj.register_forward_hook(after(Mask(spec["resid_pdrop"], 4 + 3)))
        return
    model.transformer.drop = Mask(spec["embd_pdrop"], 0)
    for layer, block in enumerate(model.transformer.h):
        site = 4 * (layer + 1)
        block.attn.attn_dropout = Mask(spec["attn_pdrop"], site + 1)
        block.attn.resid_dropout = Mask(spec["resid_pdrop"], site + 2)
        block.mlp.dropout = Mask(spec["resid_pdrop"], site + 3)


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
            if name == "lm_head.weight":
                out[name] = v
                continue
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
            out[f"{block}{ours}.{parts[-1]}"] = v.T if transposed else v
    return {k: np.ascontiguousarray(v, dtype=np.float32) for k, v in out.items()}


def logits_of(model, tokens, starts):
    """[rows, T, V]; `starts`, where given, of each token's document."""
    tokens = torch.from_numpy(tokens).long()
    if starts is None:
        return model(input_ids=tokens).logits
    if isinstance(model, transformers.LlamaForCausalLM):  # takes a mask
        keys = torch.arange(tokens.shape[1])
        seen = (keys[None, None, :] >= torch.from_numpy(starts)[:, :, None]) & (
            keys[None, None, :] <= keys[None, :, None])
        mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -math.inf)
        return model(input_ids=tokens, attention_mask=mask[:, None]).logits
    rows = []  # GPT-2 here takes none: each document by itself, at its positions
    for row, start in zip(tokens, starts):
        bounds = np.append(np.unique(start), len(start))
        rows.append(torch.cat([
            model(input_ids=row[None, i:j], position_ids=torch.arange(i, j)[None]).logits[0]
            for i, j in zip(bounds[:-1], bounds[1:])]))
    return torch.stack(rows)


def summed_loss(model, tokens, targets, starts=None):
    logits = logits_of(model, tokens, starts)
    return torch.nn.functional.cross_entropy(
        logits.double().view(-1, logits.shape[-1]), torch.from_numpy(targets).long().view(-1),
        ignore_index=-1, reduction="sum")


def document_starts(count, random):
    """[count, T]: one to a few documents a row, some of one token, one across an attention tile."""
    starts = np.zeros((count, SEQUENCE), dtype=np.int32)
    for row in starts:
        for begin in np.sort(random.choice(np.arange(1, SEQUENCE), random.integers(0, 6), False)):
            row[begin:] = begin
    starts[0, 60:] = 60
    starts[0, 131:] = 131
    starts[0, 132:] = 132
    return starts


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


def train(model, tokens, targets, starts):
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
        Mask.step, Mask.sample = step, rows.start
        loss = summed_loss(model, tokens[rows], targets[rows],
                           None if starts is None else starts[rows]) / (BATCH * SEQUENCE)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        curves["loss"].append(loss.item())
        curves["grad_norm"].append(norm.item())
        curves["learning_rate"].append(learning_rate(step))
    return {k: np.array(v, dtype=np.float32) for k, v in curves.items()}


def make(name, spec, seed):
    torch.nn.functional.dropout = TORCHS_DROPOUT
    generator = torch.Generator().manual_seed(seed)
    random = np.random.default_rng(seed)
    model = build(spec).float()
    randomise(model, generator)
    model = model.double().eval()
    if "attn_pdrop" in spec:
        hand_in_masks(model, spec)
    arrays = lambda: {k: p.detach().numpy().copy() for k, p in model.named_parameters()}
    gradients = lambda: {k: p.grad.detach().numpy().copy() for k, p in model.named_parameters()}
    ours = lambda prefix, values: {
        f"{prefix}/{k}": v for k, v in to_ours(model, spec["architecture"], values).items()}

    out = ours("initial", arrays())
    tokens, targets = samples(MICRO_BATCH, random)
    targets[0, 5] = targets[1, 130:140] = -1
    starts = document_starts(MICRO_BATCH, random) if name in DOCUMENTS else None
    Mask.step = Mask.sample = 0
    loss = summed_loss(model, tokens, targets, starts)
    loss.backward()
    out.update(ours("gradient", gradients()))
    out["gradient.tokens"], out["gradient.targets"] = tokens, targets
    out["gradient.loss"] = np.array([loss.item()], dtype=np.float32)
    with torch.no_grad():
        logits = logits_of(model, tokens, starts)[:, LOGIT_POSITIONS]
    out["logits"] = np.ascontiguousarray(logits.numpy(), dtype=np.float32)
    out["logits.positions"] = np.array(LOGIT_POSITIONS, dtype=np.int32)

    out["tokens"], out["targets"] = samples(STEPS * BATCH, random)
    train_starts = None
    if starts is not None:
        train_starts = document_starts(STEPS * BATCH, random)
        out["gradient.document_start"], out["document_start"] = starts, train_starts
    out.update(train(model, out["tokens"], out["targets"], train_starts))
    out.update(ours("final", arrays()))
    save_file(out, HERE / f"{name}.safetensors", metadata={
        # One entry: the order of several changes from run to run, and with it the file.
        "made_with": ", ".join(f"{k} {v}" for k, v in VERSIONS.items())})

    job = {
        "name": name.replace("_", "-"), "model": spec, "steps": STEPS,
        "train_batch_size": BATCH, "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "optimizer": {"type": "AdamW", "params": {
            "lr": LR, "betas": list(BETAS), "eps": EPS, "weight_decay": DECAY}},
        "scheduler": {"type": "cosine", "params": {"warmup_steps": WARMUP, "min_lr": MIN_LR}},
        "gradient_clipping": CLIP,
    }
    if "attn_pdrop" in spec:
        job["seed"] = DROPOUT_SEED
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
