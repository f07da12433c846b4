#include "common/spec/deepspeed_keys.h"

#include <map>
#include <string>

#include "absl/strings/ascii.h"

namespace zeroshard {
namespace {

using Table = std::map<absl::string_view, absl::string_view>;

constexpr absl::string_view kNoEffect = "it would change nothing here; remove it";
constexpr absl::string_view kFp16Fixed =
    "fp16 jobs keep fp32 master weights, moments and accumulation; remove it";
constexpr absl::string_view kBf16Fixed =
    "bf16 jobs keep fp32 master weights, moments and accumulation; remove it";
constexpr absl::string_view kMetrics =
    "every daemon serves memory, traffic and phase times on /metrics; remove it";
constexpr absl::string_view kStep = "history.jsonl has every step and /metrics the rest; remove it";
constexpr absl::string_view kOffloadHere =
    "the shard stores choose how they keep offloaded state; remove it";
constexpr absl::string_view kPinned =
    "what travels to and from the stores is in pinned memory wherever there is a GPU; remove it";
constexpr absl::string_view kNvmePath = "each store has its own --nvme-dir; remove it";
constexpr absl::string_view kOldOffload = "write offload_optimizer: {device: cpu} instead";
constexpr absl::string_view kOldOffloadParam = "write offload_param: {device: cpu} instead";
constexpr absl::string_view kPlainMomentum =
    "SGD is with plain momentum, neither dampened nor Nesterov's; remove it";
constexpr absl::string_view kZeroPlusPlus =
    "gradients and weights travel unquantised, over all ranks; remove it";
constexpr absl::string_view kCheckpointing =
    "write activation_checkpointing: true to keep only each unit's input";
constexpr absl::string_view kSum =
    "gradients are summed in a fixed order and scaled once at the optimizer; remove it";
constexpr absl::string_view kOneFormat =
    "checkpoints load at any world size and stage and every rank writes its own part; remove it";
constexpr absl::string_view kNotHere = "there is no such feature in this version; remove it";
constexpr absl::string_view kDense = "every model here is dense; remove it";
constexpr absl::string_view kNames =
    "tensors are gathered by unit and no unit is split finer; remove it";
constexpr absl::string_view kAdamW = "AdamW is always decoupled and bias-corrected; remove it";

const Table& Keys() {
  static const Table* const keys = new Table{
      // Batches and data.
      {"dataloader_drop_last", "an epoch's left-over tokens are never padded; remove it"},
      {"data_efficiency", kNotHere},
      {"curriculum_learning", kNotHere},
      {"managed_gradient_accumulation", "accumulation always follows the batch sizes; remove it"},
      // Precision.
      {"amp", "use bf16: {enabled: true} instead"},
      {"torch_autocast", "use bf16: {enabled: true} instead"},
      {"bfloat16", "write bf16 instead"},
      {"data_types", "gradients accumulate in fp32; remove it"},
      {"fp16.auto_cast", "inputs are tokens, which are never cast; remove it"},
      {"fp16.fused_mode", kNoEffect},
      {"fp16.fp16_master_weights_and_grads", kFp16Fixed},
      {"bf16.immediate_grad_update", kBf16Fixed},
      {"bf16.check_grad_overflow", "every gradient is checked for non-finite values; remove it"},
      {"bf16.bf16_master_weights_and_grads", kBf16Fixed},
      {"bf16.bf16_optimizer_states", kBf16Fixed},
      {"bf16.auto_cast", kBf16Fixed},
      // Communication.
      {"communication_data_type", "gradients travel in the job's own type; remove it"},
      {"seq_parallel_comm_data_type", kNotHere},
      {"prescale_gradients", kSum},
      {"gradient_predivide_factor", kSum},
      {"gradient_allreduce_op", kSum},
      {"disable_allgather", "parameters are always all-gathered; remove it"},
      {"sparse_gradients", "gradients travel dense; remove it"},
      {"comms_logger", kMetrics},
      // Watching.
      {"steps_per_print", "every step is reported; remove it"},
      {"wall_clock_breakdown", kMetrics},
      {"memory_breakdown", kMetrics},
      {"dump_state", "zeroshard validate prints the complete specification; remove it"},
      {"log_level", kNoEffect},
      {"flops_profiler", kMetrics},
      {"timers", kMetrics},
      {"autotuning", kNotHere},
      {"monitor_config", kStep},
      {"tensorboard", kStep},
      {"wandb", kStep},
      {"comet", kStep},
      {"csv_monitor", kStep},
      {"swanlab", kStep},
      // Optimizer and scheduler.
      {"optimizer.legacy_fusion", kAdamW},
      {"optimizer.params.torch_adam", kAdamW},
      {"optimizer.params.adam_w_mode", kAdamW},
      {"optimizer.params.bias_correction", kAdamW},
      {"optimizer.params.amsgrad", kAdamW},
      {"optimizer.params.set_grad_none", kNoEffect},
      {"optimizer.params.fp32_optimizer_states", "moments are always fp32; remove it"},
      {"optimizer.params.max_grad_norm", "write gradient_clipping at the top level instead"},
      {"optimizer.params.freeze_step", "there is no 1-bit optimizer; remove it"},
      {"optimizer.params.cuda_aware", "there is no 1-bit optimizer; remove it"},
      {"optimizer.params.comm_backend_name", "there is no 1-bit optimizer; remove it"},
      {"optimizer.params.dampening", kPlainMomentum},
      {"optimizer.params.nesterov", kPlainMomentum},
      {"scheduler.params.last_batch_iteration", "a job's schedule starts at its step 1; remove it"},
      {"zero_allow_untested_optimizer", kNoEffect},
      {"zero_force_ds_cpu_optimizer", kNoEffect},
      {"max_grad_norm", "write gradient_clipping instead"},
      // ZeRO.
      {"zero_optimization.contiguous_gradients",
       "a unit's gradients always lie in one buffer; remove it"},
      {"zero_optimization.reduce_scatter", "gradients are always reduce-scattered; remove it"},
      {"zero_optimization.use_multi_rank_bucket_allreduce",
       "gradients are always reduce-scattered; remove it"},
      {"zero_optimization.allgather_partitions", "parameters are always all-gathered; remove it"},
      {"zero_optimization.allgather_bucket_size",
       "a unit is gathered whole; stage3_prefetch_bucket_size bounds what is gathered ahead"},
      {"zero_optimization.load_from_fp32_weights", "master weights are fp32; remove it"},
      {"zero_optimization.elastic_checkpoint", kNotHere},
      {"zero_optimization.zenflow", kNotHere},
      {"zero_optimization.sub_group_size", "the optimizer runs unit by unit; remove it"},
      {"zero_optimization.round_robin_gradients",
       "each rank owns one run of each unit's gradients; remove it"},
      {"zero_optimization.ignore_unused_parameters",
       "every trainable parameter is used; freeze others with model.trainable; remove it"},
      {"zero_optimization.legacy_stage1", kNoEffect},
      {"zero_optimization.cpu_offload", kOldOffload},
      {"zero_optimization.cpu_offload_params", kOldOffloadParam},
      {"zero_optimization.cpu_offload_param", kOldOffloadParam},
      {"zero_optimization.cpu_offload_use_pin_memory", kPinned},
      {"zero_optimization.prefetch_bucket_size", "write stage3_prefetch_bucket_size instead"},
      {"zero_optimization.param_persistence_threshold",
       "write stage3_param_persistence_threshold instead"},
      {"zero_optimization.max_live_parameters", "write stage3_max_live_parameters instead"},
      {"zero_optimization.max_reuse_distance", "write stage3_max_reuse_distance instead"},
      {"zero_optimization.stage3_model_persistence_threshold",
       "stage3_param_persistence_threshold alone says which units stay; remove it"},
      {"zero_optimization.model_persistence_threshold",
       "stage3_param_persistence_threshold alone says which units stay; remove it"},
      {"zero_optimization.stage3_gather_fp16_weights_on_model_save",
       "write stage3_gather_16bit_weights_on_model_save instead"},
      {"zero_optimization.gather_16bit_weights_on_model_save",
       "write stage3_gather_16bit_weights_on_model_save instead"},
      {"zero_optimization.stage3_module_granularity_threshold", kNames},
      {"zero_optimization.stage3_use_all_reduce_for_fetch_params", kNames},
      {"zero_optimization.stage3_allgather_sequential", kNames},
      {"zero_optimization.stage3_partition_stream_chunk_size", kNames},
      {"zero_optimization.leaf_module", kNames},
      {"zero_optimization.zero_hpz_partition_size", kZeroPlusPlus},
      {"zero_optimization.zero_quantized_weights", kZeroPlusPlus},
      {"zero_optimization.zero_quantized_nontrainable_weights", kZeroPlusPlus},
      {"zero_optimization.zero_quantized_gradients", kZeroPlusPlus},
      {"zero_optimization.zeropp_loco_param", kZeroPlusPlus},
      {"zero_optimization.mics_shard_size", kZeroPlusPlus},
      {"zero_optimization.mics_hierarchical_params_gather", kZeroPlusPlus},
      {"zero_optimization.memory_efficient_linear", kNoEffect},
      {"zero_optimization.pipeline_loading_checkpoint", kNotHere},
      {"zero_optimization.override_module_apply", kNoEffect},
      {"zero_optimization.log_trace_cache_warnings",
       "the prefetch order is the model's own, there is no trace; remove it"},
      {"zero_optimization.enable_sanity_checks", kNoEffect},
      {"zero_optimization.save_muon_momentum_buffer_in_memory", kNotHere},
      {"zero_optimization.offload_optimizer.pin_memory", kPinned},
      {"zero_optimization.offload_optimizer.nvme_path", kNvmePath},
      {"zero_optimization.offload_optimizer.pipeline", kOffloadHere},
      {"zero_optimization.offload_optimizer.pipeline_read", kOffloadHere},
      {"zero_optimization.offload_optimizer.pipeline_write", kOffloadHere},
      {"zero_optimization.offload_optimizer.fast_init", kOffloadHere},
      {"zero_optimization.offload_optimizer.ratio", kOffloadHere},
      {"zero_optimization.offload_optimizer.super_offload", kOffloadHere},
      {"zero_optimization.offload_optimizer.convert_grad_on_cpu", kOffloadHere},
      {"zero_optimization.offload_optimizer.cpuadam_cores_perc", kOffloadHere},
      {"zero_optimization.offload_param.pin_memory", kPinned},
      {"zero_optimization.offload_param.nvme_path", kNvmePath},
      {"zero_optimization.offload_param.max_in_cpu", kOffloadHere},
      {"aio", kOffloadHere},
      // Activations. The key itself is ours, as a boolean.
      {"activation_checkpointing.partition_activations", kCheckpointing},
      {"activation_checkpointing.cpu_checkpointing", kCheckpointing},
      {"activation_checkpointing.contiguous_memory_optimization", kCheckpointing},
      {"activation_checkpointing.number_checkpoints", kCheckpointing},
      {"activation_checkpointing.synchronize_checkpoint_boundary", kCheckpointing},
      {"activation_checkpointing.profile", kCheckpointing},
      // Checkpoints.
      {"checkpoint.tag_validation", kOneFormat},
      {"checkpoint.load_universal", kOneFormat},
      {"checkpoint.use_node_local_storage", kOneFormat},
      {"checkpoint.parallel_write", kOneFormat},
      {"checkpoint.writer", kOneFormat},
      {"nebula", kNotHere},
      {"datastates_ckpt", kNotHere},
      // Models and parallelism.
      {"sparse_attention", "attention is causal and exact; remove it"},
      {"tensor_parallel", "write parallel: {tensor: N}, with its autotp_size for N"},
      {"autotp_size", "write parallel: {tensor: N}, with the same N"},
      {"pipeline",
       "write parallel: {pipeline: N}, with its stages for N; units are cut by what they cost"},
      {"pipeline_parallel_size", "write parallel: {pipeline: N}, with the same N"},
      {"sequence_parallel_size",
       "write parallel: {tensor: N, sequence_parallel: true}: sequences are divided among the "
       "ranks "
       "of a tensor group"},
      {"expert_parallel", kDense},
      {"use_data_before_expert_parallelism", kDense},
      {"vocabulary_size", "write model.vocab_size instead"},
      {"progressive_layer_drop", kNotHere},
      {"eigenvalue", kNotHere},
      {"quantize_training", kNotHere},
      {"compression_training", kNotHere},
      {"weight_quantization", kNotHere},
      {"hybrid_engine", kNotHere},
      {"compile", "there is no compiler at run time; remove it"},
      {"graph_harvesting", kNotHere},
      {"elasticity", "a job keeps the size that resources.workers gives it; remove it"},
  };
  return *keys;
}

absl::string_view Find(const Table& table, absl::string_view key) {
  const auto found = table.find(key);
  return found == table.end() ? absl::string_view() : found->second;
}

}  // namespace

absl::string_view DeepSpeedKeyAdvice(absl::string_view path) { return Find(Keys(), path); }

absl::string_view DeepSpeedOptimizerAdvice(absl::string_view type) {
  static const Table* const types = new Table{
      {"adam",
       "DeepSpeed runs it as AdamW (adam_w_mode is true there): write AdamW, the same update"},
      {"adagrad", "use AdamW"},
      {"lamb", "use AdamW"},
      {"lion", "use AdamW"},
      {"muon", "use AdamW"},
      {"onebitadam", "use AdamW"},
      {"onebitlamb", "use AdamW"},
      {"zerooneadam", "use AdamW"},
      {"muadam", "use AdamW"},
      {"muadamw", "use AdamW"},
      {"musgd", "use AdamW"},
  };
  return Find(*types, absl::AsciiStrToLower(type));
}

absl::string_view DeepSpeedSchedulerAdvice(absl::string_view type) {
  static const Table* const types = new Table{
      {"lrrangetest", "use linear or WarmupLR"},
      {"onecycle", "use cosine or WarmupCosineLR"},
  };
  return Find(*types, absl::AsciiStrToLower(type));
}

}  // namespace zeroshard
