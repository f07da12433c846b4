// A job's mesh (common/plan/rank_mesh.h) as text.
#pragma once

#include <string>

#include "zeroshard/v1/job.pb.h"
#include "zeroshard/v1/jobs.pb.h"

namespace zeroshard {

// It has more than a data dimension.
bool IsMesh(const v1::Mesh& mesh);

// "pipeline 2 x data 2 x tensor 2"; empty without a mesh.
std::string DescribeMesh(const v1::Mesh& mesh);
// Of a normalised specification; also what share of a step a pipeline stands idle at the best.
std::string DescribeMesh(const v1::JobSpec& spec);

// Who is where: a line for each stage and tensor rank, a column for each data-parallel rank. Empty
// without a mesh, and while nobody is placed.
std::string FormatMesh(const v1::JobStatus& status);

}  // namespace zeroshard
