#!/usr/bin/env bash
# jobs_test.sh ZEROSHARD: the example jobs, and the one that the README shows, pass 'validate'.
set -euo pipefail

# shellcheck source=tests/deploy/expect.sh
source "$(dirname "${BASH_SOURCE[0]}")/expect.sh"
zeroshard="$1"

for job in "$REPOSITORY"/deploy/jobs/*.yaml; do
  expect_end 0 . "$zeroshard" validate "$job"
done

awk -v to="$scratch/readme-" '/^```yaml$/ {inside = 1; n++; next} /^```$/ {inside = 0}
  inside {print > (to n ".yaml")}' "$REPOSITORY/README.md"
expect_end 0 . "$zeroshard" validate "$scratch/readme-1.yaml"

# The second names a model's folder; of SmolLM2-135M, what its publishers say of its shape.
mkdir "$scratch/SmolLM2-135M"
cat >"$scratch/SmolLM2-135M/config.json" <<'CONFIG'
{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 576,
 "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
 "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192,
 "rope_theta": 100000, "rms_norm_eps": 1e-05, "hidden_act": "silu", "tie_word_embeddings": true}
CONFIG
expect_end 0 'valid: 134,5[0-9]{2},[0-9]{3} parameters' "$zeroshard" validate "$scratch/readme-2.yaml"

sed 's/^steps:/stepz:/' "$REPOSITORY/deploy/jobs/licences.yaml" >"$scratch/misspelt.yaml"
expect_end 2 "misspelt.yaml:[0-9]+.*stepz.*steps" "$zeroshard" validate "$scratch/misspelt.yaml"
finish
