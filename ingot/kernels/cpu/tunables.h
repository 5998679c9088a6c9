// Thresholds and distances that `ingot tune --device cpu` sets; what they are is in tuning.py, in the
// same order. None changes a bit of a result.
#pragma once

#include <cstdint>

namespace ingot {

enum class Tunable {
  PACK_ROWS,
  PACK_CHANNELS,
  PACK_DEPTH,
  LANE_ROWS,
  LANE_TERMS,
  AMX_ROWS,
  AMX_DEPTH,
  INT_PREFETCH,
  INT_SCALE_PREFETCH,
  TASK_ELEMENTS,
  TASKS_PER_THREAD,
  COUNT
};

// Values in memory owned by Python, shared by all libraries.
inline const int64_t* tunables = nullptr;

inline int64_t tunable(Tunable name) { return tunables[int(name)]; }

}  // namespace ingot
