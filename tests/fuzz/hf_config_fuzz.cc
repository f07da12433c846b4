// A config.json is refused, or describes a model whose tables can be made or are refused in turn.
#include "common/hf/config.h"
#include "common/plan/model_table.h"
#include "tests/fuzz/fuzz_target.h"

namespace zeroshard {

std::vector<std::string> FuzzSeeds() {
  return {
      R"({"model_type":"gpt2","vocab_size":20,"n_embd":8,"n_layer":2,"n_head":2,"n_positions":6,)"
      R"("n_inner":null,"activation_function":"gelu_new","attn_pdrop":0.1,"n_ctx":6})",
      R"({"model_type":"llama","vocab_size":20,"hidden_size":16,"intermediate_size":24,)"
      R"("num_hidden_layers":2,"num_attention_heads":2,"num_key_value_heads":1,"head_dim":8,)"
      R"("rope_theta":500000.0,"rope_scaling":{"rope_type":"llama3","factor":8.0,)"
      R"("low_freq_factor":1.0,"high_freq_factor":4.0,"original_max_position_embeddings":8192}})",
      R"({"model_type":"mistral","vocab_size":20,"hidden_size":16,"intermediate_size":24,)"
      R"("num_hidden_layers":2,"num_attention_heads":2,"num_key_value_heads":1,)"
      R"("sliding_window":4096,"rope_parameters":{"rope_type":"linear","factor":2,)"
      R"("rope_theta":1e6},"layer_types":["full_attention"]})",
  };
}

}  // namespace zeroshard

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view text(reinterpret_cast<const char*>(data), size);
  auto config = zeroshard::ParseHfConfig(text, "input");
  if (!config.ok()) return 0;
  config->model.set_sequence_length(4);
  // Not the table: a mutated number of layers takes time.
  if (zeroshard::MakeModelConfig(config->model).ok()) {
    (void)zeroshard::FormatHfConfig(config->model, "float32");
  }
  return 0;
}
