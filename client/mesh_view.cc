#include "client/mesh_view.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/render.h"
#include "common/plan/job_mesh.h"
#include "common/plan/pipeline_time.h"
#include "common/spec/job_spec.h"

namespace zeroshard {
namespace {

constexpr uint32_t kColumns = 4;  // of data-parallel ranks beside each other

using Place = std::tuple<uint32_t, uint32_t, uint32_t>;  // pipeline, data, tensor
using Cells = std::map<Place, std::string>;

std::string Columns(const v1::Mesh& mesh, const Cells& cells, uint32_t first) {
  const uint32_t end = std::min(mesh.data(), first + kColumns);
  std::vector<std::vector<std::string>> rows = {{"STAGE", "TENSOR"}};
  for (uint32_t data = first; data < end; ++data) rows[0].push_back(absl::StrCat("DATA ", data));
  for (uint32_t pipeline = 0; pipeline < mesh.pipeline(); ++pipeline) {
    for (uint32_t tensor = 0; tensor < mesh.tensor(); ++tensor) {
      std::vector<std::string>& row = rows.emplace_back();
      row = {tensor == 0 ? absl::StrCat(pipeline) : "", absl::StrCat(tensor)};
      for (uint32_t data = first; data < end; ++data) {
        const auto cell = cells.find({pipeline, data, tensor});
        row.push_back(cell == cells.end() ? "-" : cell->second);
      }
    }
  }
  return FormatTable(rows);
}

}  // namespace

bool IsMesh(const v1::Mesh& mesh) { return mesh.pipeline() > 1 || mesh.tensor() > 1; }

std::string DescribeMesh(const v1::Mesh& mesh) {
  if (!IsMesh(mesh)) return "";
  return absl::StrCat("pipeline ", mesh.pipeline(), " x data ", mesh.data(), " x tensor ",
                      mesh.tensor());
}

std::string DescribeMesh(const v1::JobSpec& spec) {
  const auto shape = MeshOf(spec, spec.resources().workers());
  if (!shape.ok() || RanksOfReplica(spec) == 1) return "";
  v1::Mesh mesh;
  mesh.set_pipeline(static_cast<uint32_t>(shape->pipeline));
  mesh.set_data(static_cast<uint32_t>(shape->data));
  mesh.set_tensor(static_cast<uint32_t>(shape->tensor));
  std::string text = DescribeMesh(mesh);
  if (spec.parallel().sequence_parallel()) absl::StrAppend(&text, " with sequence parallelism");
  if (shape->pipeline == 1) return text;
  const uint64_t rounds =
      (MicroBatchesPerStep(spec) + mesh.data() - 1) / std::max<uint32_t>(1, mesh.data());
  const uint32_t runs = std::max<uint32_t>(1, spec.parallel().virtual_stages());
  const PipelineShape pipeline{.stages = shape->pipeline,
                               .virtual_stages = static_cast<int>(runs),
                               .micro_batches = static_cast<int64_t>(rounds)};
  absl::StrAppendFormat(
      &text, "; %d micro-batch%s of a rank and step through %d stages%s leave it idle for %.2g %%",
      rounds, rounds == 1 ? "" : "es", mesh.pipeline(),
      runs == 1 ? "" : absl::StrCat(" (", runs, " runs of units each)"),
      100 * PredictedBubble(pipeline));
  return text;
}

std::string FormatMesh(const v1::JobStatus& status) {
  const v1::Mesh& mesh = status.mesh();
  if (!IsMesh(mesh) || status.ranks().empty()) return "";
  Cells cells;
  for (const v1::RankStatus& rank : status.ranks()) {
    const v1::MeshPosition& at = rank.position();
    cells[{at.pipeline(), at.data(), at.tensor()}] =
        absl::StrCat(rank.rank(), ": ", rank.member(), " on ", rank.host());
  }
  std::string text;
  // What a coordinator says of its size is not more than there are ranks.
  if (uint64_t{mesh.pipeline()} * mesh.tensor() * mesh.data() != cells.size()) return "";
  for (uint32_t first = 0; first < mesh.data(); first += kColumns) {
    absl::StrAppend(&text, text.empty() ? "" : "\n", Columns(mesh, cells, first));
  }
  return text;
}

}  // namespace zeroshard
