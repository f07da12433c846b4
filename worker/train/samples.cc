#include "worker/train/samples.h"

#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "common/plan/zero_policy.h"
#include "common/status_macros.h"
#include "worker/generate/generator.h"
#include "worker/generate/text_stream.h"

namespace zeroshard {
namespace {

// The engine's forward-only pass.
class EngineLender : public ParameterLender {
 public:
  EngineLender(ZeroEngine* engine, uint64_t step, const ModelRunner::Progress* progress,
               const std::atomic<bool>* stop)
      : engine_(engine), step_(step), progress_(*progress), stop_(*stop) {}

  absl::Status BeginPass() override {
    if (stop_) return absl::CancelledError("stopped");
    progress_(StepPhase::kForward, "samples");
    engine_->BeginEvaluation(step_);
    return absl::OkStatus();
  }
  absl::StatusOr<LentParameters> Borrow(int unit) override {
    ZS_ASSIGN_OR_RETURN(const UnitParameters parameters, engine_->BeforeForward(unit));
    return LentParameters{.own = parameters.own, .lm_head = parameters.lm_head};
  }
  absl::Status GiveBack(int unit) override { return engine_->AfterForward(unit); }

 private:
  ZeroEngine* const engine_;
  const uint64_t step_;
  const ModelRunner::Progress& progress_;
  const std::atomic<bool>& stop_;
};

}  // namespace

SampleWriter::SampleWriter(const v1::JobSpec& spec, const Tokenizer* tokenizer, const Model* model,
                           ZeroEngine* engine, Device* device, Ops* ops)
    : spec_(spec.sample()),
      dtype_(ComputeType(spec)),
      seed_(spec.seed()),
      tokenizer_(tokenizer),
      model_(model),
      engine_(engine),
      device_(device),
      ops_(ops) {}

absl::StatusOr<std::unique_ptr<SampleWriter>> SampleWriter::Create(
    const v1::JobSpec& spec, const Tokenizer* tokenizer, const std::string& model_folder,
    const Model* model, ZeroEngine* engine, Device* device, Ops* ops) {
  ZS_ASSIGN_OR_RETURN(const TextEnds ends,
                      ReadTextEnds(spec.data().tokenizer(), *tokenizer, model_folder, &spec.data(),
                                   model->table.config.vocab));
  std::unique_ptr<SampleWriter> writer(
      new SampleWriter(spec, tokenizer, model, engine, device, ops));
  for (const std::string& text : spec.sample().prompts())
    ZS_RETURN_IF_ERROR(writer->AddPrompt(text, ends));
  return writer;
}

absl::Status SampleWriter::AddPrompt(const std::string& text, const TextEnds& ends) {
  constexpr size_t kShown = 60;
  const std::string what = absl::StrCat("sample.prompts: \"", absl::CEscape(text.substr(0, kShown)),
                                        text.size() > kShown ? "..." : "", "\"");
  ZS_ASSIGN_OR_RETURN(ContinuationOptions prompt,
                      MakePrompt(what, text, *tokenizer_, ends, model_->table.config));
  prompt.max_tokens = spec_.max_tokens();
  prompt.sampling.temperature = spec_.temperature();
  prompt.sampling.top_k = spec_.top_k();
  prompt.sampling.seed = seed_;
  prompt.run_to_length = true;  // the same gathers on every rank
  prompts_.push_back(std::move(prompt));
  return absl::OkStatus();
}

absl::Status SampleWriter::Run(uint64_t step, const ModelRunner::Progress& progress,
                               const std::atomic<bool>& stop,
                               const std::function<void(const v1::SampleRecord&)>& each) {
  EngineLender lender(engine_, step, &progress, &stop);
  const int64_t most = Generator::Positions(model_->table.config);
  for (size_t i = 0; i < prompts_.size(); ++i) {
    ZS_ASSIGN_OR_RETURN(const std::unique_ptr<Generator> generator,
                        Generator::Create(model_, device_, ops_, dtype_,
                                          std::min(most, PositionsWanted(prompts_[i]))));
    ZS_ASSIGN_OR_RETURN(const Continuation answer, Continue(prompts_[i], generator.get(), &lender));
    TextStream stream(tokenizer_);
    v1::SampleRecord record;
    record.set_step(step);
    record.set_prompt(spec_.prompts(static_cast<int>(i)));
    for (int32_t token : answer.tokens) {
      ZS_ASSIGN_OR_RETURN(const std::string text, stream.Add(token));
      record.mutable_text()->append(text);
    }
    record.mutable_text()->append(stream.Finish());
    each(record);
  }
  return absl::OkStatus();
}

}  // namespace zeroshard
