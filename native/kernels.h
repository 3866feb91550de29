// The kernels of one instruction set, as the dispatcher sees them. `plan` has been made with the tuning of the same set.
#pragma once
#include "interface.h"

namespace partita {

enum Outcome : int32_t { FINITE = 0, NOT_FINITE = 1, NO_MEMORY = 2 };

struct Kernels {
  Tuning (*tuning)(const PartitaProblem&);
  int32_t (*reduce)(const PartitaProblem&, const Plan&, const PartitaSums&);
  Tuning (*backward_tuning)(const PartitaProblem&);
  int32_t (*backward)(const PartitaProblem&, const BackwardPlan&, const PartitaGradients&);
  int32_t (*rows)(const PartitaRows&);
  int32_t (*logits)(const PartitaLogits&);
  void (*tally)(const PartitaTally&);
};

#define PARTITA_DECLARE(isa)                                                                   \
  namespace isa {                                                                              \
  Tuning tuning(const PartitaProblem&);                                                        \
  int32_t reduce(const PartitaProblem&, const Plan&, const PartitaSums&);                      \
  Tuning backward_tuning(const PartitaProblem&);                                               \
  int32_t backward(const PartitaProblem&, const BackwardPlan&, const PartitaGradients&);       \
  int32_t rows(const PartitaRows&);                                                            \
  int32_t logits(const PartitaLogits&);                                                        \
  void tally(const PartitaTally&);                                                             \
  constexpr Kernels kernels = {tuning, reduce, backward_tuning, backward, rows, logits, tally}; \
  }
PARTITA_DECLARE(baseline)
PARTITA_DECLARE(avx2)
PARTITA_DECLARE(avx512)

}  // namespace partita
