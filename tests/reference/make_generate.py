#!/usr/bin/env python3
"""Writes generate.safetensors: what transformers' greedy search answers. Not needed to build or to
test; run it as make_reference.py, whose models (at their initial weights) it continues prompts with.

For each model of NAMES and prompt P (0: a few tokens, 1: one token, 2: longer than
an attention tile), I32 and F32:
  NAME.P.prompt [n]
  NAME.P.greedy [m]         what model.generate(do_sample=False) appends, up to the last position
  NAME.P.logits [2, VOCAB]  before the first and the last of those tokens
Computed in float64. Where the likeliest token leads by less than MARGIN the prompt is not used: fp32
could answer otherwise.
"""

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

import make_reference as reference

NAMES = ["gpt2", "llama", "llama_tied", "llama_biased", "qwen2"]
MARGIN = 2e-3
LENGTHS = [7, 1, 131]
MOST = 24


def continue_prompt(model, prompt):
    count = min(MOST, reference.SEQUENCE - len(prompt))
    answer = model.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=count, eos_token_id=None,
        # Without a mask, tokens equal to pad_token_id would not be attended to.
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long), pad_token_id=0,
        return_dict_in_generate=True, output_logits=True)
    logits = torch.cat(answer.logits).numpy()
    best = np.sort(logits, axis=-1)
    return answer.sequences[0, len(prompt):].numpy(), logits, (best[:, -1] - best[:, -2]).min()


def main():
    out = {}
    for seed, (name, spec) in enumerate(reference.CASES.items(), start=1):
        if name not in NAMES:
            continue
        model = reference.build(spec).float()
        reference.randomise(model, torch.Generator().manual_seed(seed))
        ours = reference.to_ours(model, spec["architecture"],
                                 {k: p.detach().numpy() for k, p in model.named_parameters()})
        committed = load_file(reference.HERE / f"{name}.safetensors")
        for key, value in ours.items():
            assert np.array_equal(value, committed[f"initial/{key}"]), key
        model = model.double().eval()
        random = np.random.default_rng(seed)
        for index, length in enumerate(LENGTHS):
            while True:
                prompt = random.integers(0, reference.VOCAB, length).tolist()
                greedy, logits, margin = continue_prompt(model, prompt)
                if margin >= MARGIN:
                    break
            out[f"{name}.{index}.prompt"] = np.array(prompt, dtype=np.int32)
            out[f"{name}.{index}.greedy"] = greedy.astype(np.int32)
            out[f"{name}.{index}.logits"] = logits[[0, -1]].astype(np.float32)
            print(name, length, greedy, margin)
    save_file(out, reference.HERE / "generate.safetensors",
              metadata={"format": "pt", **reference.VERSIONS})


if __name__ == "__main__":
    main()
