#!/usr/bin/env python3
"""Writes the reference values of fp16 training. Not needed to build or to test.

    the environment of make_reference.py, and
    DS_BUILD_OPS=0 venv/bin/pip install --no-build-isolation deepspeed==0.15.4
    venv/bin/python tests/reference/make_fp16.py

gpt2_fp16: transformers' GPT-2 with weights, activations and gradients in float16 on the CPU, fp32
masters in torch's AdamW, and the loss scale that DeepSpeed's DynamicLossScaler says. Files, tensors
and their names are make_reference.py's, without the group gradient and the logits, and also

    loss_scale [steps]  of each step
    skipped [steps]     1 where a gradient overflowed, and nothing was updated

The scale is that of the mean loss over the tokens of a micro-batch, as if those were 2^floor(log2)
of them. Gradients of the micro-batches are added in fp32 and rounded to float16 once. grad_norm is
of the mean loss, before clipping, and infinite where the step was skipped.

Where a step is skipped must not hang on one rounding: the largest gradient, of a parameter or an
activation, of a model in float64 with the same weights lies outside of 0.87 to 1.15 times float16's
range in every step. SEED was tried for that.

loss_scale.json: scales of DynamicLossScaler over runs of overflows ('o') and good steps ('.').
"""

import copy
import json
import math

import deepspeed.comm
import numpy as np
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from safetensors.numpy import save_file

import make_reference as reference
from make_reference import (BATCH, BETAS, CLIP, DECAY, EPS, HERE, LR, MICRO_BATCH, MIN_LR, SEQUENCE,
                            STEPS, VERSIONS, WARMUP)

DEEPSPEED = "0.15.4"
SPEC = dict(architecture="gpt2", hidden_size=32, layers=2, heads=2, sequence_length=SEQUENCE,
            vocab_size=reference.VOCAB)
FP16 = dict(enabled=True, initial_scale_power=20, loss_scale_window=3, hysteresis=2,
            min_loss_scale=1.0)
TOKENS = MICRO_BATCH * SEQUENCE
LARGEST = 65504.0
SEED = 40


def scaler_of(fp16):
    return DynamicLossScaler(
        init_scale=2.0 ** fp16["initial_scale_power"], scale_factor=2.0,
        scale_window=fp16["loss_scale_window"], min_scale=fp16["min_loss_scale"],
        delayed_shift=fp16["hysteresis"],
        consecutive_hysteresis=fp16.get("consecutive_hysteresis", False),
        raise_error_at_min_scale=True, dtype=torch.half)


def scaled_loss(model, tokens, targets, scale):
    """Of one micro-batch, with the summed loss itself."""
    logits = model(input_ids=torch.from_numpy(tokens).long()).logits
    logits = logits if logits.dtype == torch.float64 else logits.float()
    loss = torch.nn.functional.cross_entropy(
        logits.view(-1, logits.shape[-1]), torch.from_numpy(targets).long().view(-1),
        reduction="sum")
    return loss * (scale / 2 ** math.floor(math.log2(TOKENS))), loss.item()


def largest_gradient(model, tokens, targets, scale):
    """Of anything in float64."""
    exact = copy.deepcopy(model).double()
    largest = [0.0]

    def note(_, inputs, outputs):
        for gradient in (*inputs, *outputs):
            if gradient is not None:
                largest[0] = max(largest[0], gradient.abs().max().item())

    for module in exact.modules():
        if not list(module.children()):
            module.register_full_backward_hook(note)
    for rows in micro_batches(len(tokens)):
        loss, _ = scaled_loss(exact, tokens[rows], targets[rows], scale)
        loss.backward()
    return max([largest[0], *(p.grad.abs().max().item() for p in exact.parameters())])


def micro_batches(count):
    return [slice(i, i + MICRO_BATCH) for i in range(0, count, MICRO_BATCH)]


def summed_gradients(model, tokens, targets, scale):
    """Of the scaled loss, float16 values in fp32; and the mean loss."""
    sums = [torch.zeros(p.shape) for p in model.parameters()]
    total = 0.0
    for rows in micro_batches(len(tokens)):
        model.zero_grad()
        loss, plain = scaled_loss(model, tokens[rows], targets[rows], scale)
        loss.backward()
        total += plain
        for gradient, p in zip(sums, model.parameters()):
            gradient += p.grad.float()
    return [gradient.half().float() for gradient in sums], total / tokens.size


def train(model, tokens, targets):
    half = copy.deepcopy(model).half()
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in masters if p.dim() == 2], "weight_decay": DECAY},
         {"params": [p for p in masters if p.dim() != 2], "weight_decay": 0.0}],
        lr=LR, betas=BETAS, eps=EPS)
    scaler = scaler_of(FP16)
    curves = {k: [] for k in ("loss", "grad_norm", "learning_rate", "loss_scale", "skipped")}
    for step in range(1, STEPS + 1):
        rows = slice((step - 1) * BATCH, step * BATCH)
        scale = scaler.cur_scale
        gradients, loss = summed_gradients(half, tokens[rows], targets[rows], scale)
        overflow = not all(torch.isfinite(g).all() for g in gradients)
        largest = largest_gradient(half, tokens[rows], targets[rows], scale)
        print(f"step {step}: scale {scale:g}, largest gradient {largest / LARGEST:.3g} of the range")
        if 0.87 * LARGEST < largest < 1.15 * LARGEST or overflow != (largest > LARGEST):
            raise SystemExit(f"step {step}: overflow {overflow}, yet the largest is {largest}")
        unscale = 2 ** math.floor(math.log2(TOKENS)) / scale / (BATCH * SEQUENCE)
        norm = math.inf
        if not overflow:
            for p, gradient in zip(masters, gradients):
                p.grad = gradient * unscale
            norm = torch.nn.utils.clip_grad_norm_(masters, CLIP).item()
            for group in optimizer.param_groups:
                group["lr"] = reference.learning_rate(step)
            optimizer.step()
            with torch.no_grad():
                for p, master in zip(half.parameters(), masters):
                    p.copy_(master)
        scaler.update_scale(overflow)
        for key, value in zip(curves, (loss, norm, reference.learning_rate(step), scale, overflow)):
            curves[key].append(value)
    with torch.no_grad():
        for p, master in zip(model.parameters(), masters):
            p.copy_(master)
    skipped = np.array(curves.pop("skipped"), dtype=np.int32)
    return {**{k: np.array(v, dtype=np.float32) for k, v in curves.items()}, "skipped": skipped}


def make_training():
    generator = torch.Generator().manual_seed(SEED)
    random = np.random.default_rng(SEED)
    model = reference.build(SPEC).float()
    reference.randomise(model, generator)
    model.eval()
    arrays = lambda: {k: p.detach().numpy().copy() for k, p in model.named_parameters()}
    ours = lambda prefix: {
        f"{prefix}/{k}": v for k, v in reference.to_ours(model, "gpt2", arrays()).items()}
    out = ours("initial")
    out["tokens"], out["targets"] = reference.samples(STEPS * BATCH, random)
    out.update(train(model, out["tokens"], out["targets"]))
    out.update(ours("final"))
    made_with = ", ".join(f"{k} {v}" for k, v in {**VERSIONS, "deepspeed": DEEPSPEED}.items())
    save_file(out, HERE / "gpt2_fp16.safetensors", metadata={"made_with": made_with})
    job = {
        "name": "gpt2-fp16", "model": SPEC, "steps": STEPS, "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "optimizer": {"type": "AdamW", "params": {
            "lr": LR, "betas": list(BETAS), "eps": EPS, "weight_decay": DECAY}},
        "scheduler": {"type": "cosine", "params": {"warmup_steps": WARMUP, "min_lr": MIN_LR}},
        "gradient_clipping": CLIP, "fp16": FP16,
    }
    (HERE / "gpt2_fp16.json").write_text(json.dumps(job, indent=2) + "\n")
    print("scales", out["loss_scale"], "skipped", out["skipped"], "loss", out["loss"], "norms",
          out["grad_norm"])


SCHEDULES = [  # initial_scale_power, loss_scale_window, hysteresis, consecutive, min_loss_scale
    (16, 1000, 2, False, 1.0), (16, 5, 1, False, 1.0), (4, 3, 2, False, 1.0),
    (4, 3, 3, True, 1.0), (6, 1, 2, False, 1.0), (6, 1, 4, True, 1.0), (5, 4, 1, False, 3.0),
    (3, 7, 2, True, 0.5), (10, 2, 5, False, 8.0)]
RUNS, RUN_STEPS = 6, 60


def make_schedules():
    """The first runs are chosen: all good, all overflows, one overflow just before the window ends
    and one just after; the others are random. A run ends where DeepSpeed gives up."""
    random = np.random.default_rng(5)
    cases = []
    for power, window, hysteresis, consecutive, least in SCHEDULES:
        fp16 = dict(initial_scale_power=power, loss_scale_window=window, hysteresis=hysteresis,
                    consecutive_hysteresis=consecutive, min_loss_scale=least)
        runs = ["." * RUN_STEPS, "o" * RUN_STEPS,
                ("." * (window - 1) + "o" + "." * window + "o")[:RUN_STEPS]]
        runs += ["".join(random.choice(["o", "."], RUN_STEPS, p=[share, 1 - share]))
                 for share in np.linspace(0.05, 0.6, RUNS)]
        for steps in runs:
            scaler, scales, fails = scaler_of(fp16), [], False
            for step in steps:
                try:
                    scaler.update_scale(step == "o")
                except Exception as error:  # pylint: disable=broad-except
                    assert "minimum" in str(error), error
                    fails = True
                    break
                scales.append(scaler.cur_scale)
            cases.append({"fp16": fp16, "steps": steps[:len(scales) + fails], "scales": scales,
                          "fails": fails})
    lines = ",\n  ".join(json.dumps(case) for case in cases)
    (HERE / "loss_scale.json").write_text(
        f'{{"made_with": "deepspeed {DEEPSPEED}", "cases": [\n  {lines}\n]}}\n')
    print(len(cases), "schedules,", sum(case["fails"] for case in cases), "give up")


if __name__ == "__main__":
    deepspeed.comm.get_rank = lambda: 1  # it says what it does on rank 0 of a group, which is none
    torch.set_num_threads(1)
    make_training()
    make_schedules()
