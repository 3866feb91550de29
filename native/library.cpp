// The C interface: picks the instruction set once, plans a call, runs it.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "kernels.h"
#include "planner.h"

namespace partita {
namespace {

struct Choice {
  const Kernels* kernels;
  const char* name;
};

Choice choose() {
  const char* wanted = std::getenv("PARTITA_ISA");
  const bool any = !wanted || !*wanted;
  (void)any;
#ifdef PARTITA_HAS_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  if (avx512 && (any || !std::strcmp(wanted, "avx512"))) return {&avx512::kernels, "avx512"};
  if (avx2 && (any || std::strcmp(wanted, "baseline"))) return {&avx2::kernels, "avx2"};
#elif defined(PARTITA_HAS_NEON)
  if (any || std::strcmp(wanted, "baseline")) return {&neon::kernels, "neon"};  // every 64-bit ARM has it
#endif
  return {&baseline::kernels, "baseline"};
}

const Choice& choice() {
  static const Choice c = choose();
  return c;
}

}  // namespace
}  // namespace partita

#define PARTITA_API extern "C" __attribute__((visibility("default")))

using namespace partita;

// Raised with every change of the structures, so that Python never talks to a library of another version.
PARTITA_API int32_t partita_version() { return 9; }

PARTITA_API const char* partita_isa() { return choice().name; }

namespace {

// Waking a thread and waiting for it costs microseconds, on a busy machine a time slice: there must be work for it.
constexpr double WORTH_A_THREAD = 1 << 17;  // products, for each: two to ten microseconds

PartitaProblem with_useful_threads(const PartitaProblem& given) {
  PartitaProblem p = given;
  const double work = static_cast<double>(p.B * p.Q) * static_cast<double>(p.K) * static_cast<double>(p.D + p.V);
  p.threads = static_cast<int32_t>(std::max(1.0, std::min<double>(p.threads, work / WORTH_A_THREAD)));
  return p;
}

int32_t run_forward(const PartitaProblem& given, const PartitaSums& to) {
  const PartitaProblem p = with_useful_threads(given);
  PlanStorage storage;
  Tuning tuning = choice().kernels->forward_tuning(p);
  tuning.columns = to.col_peak != nullptr;
  return choice().kernels->forward(p, make_plan(p, tuning, storage), to);
}

// No exception leaves the library: what it could not allocate is an outcome.
template <class Call>
int32_t guarded(const Call& call) {
  try {
    return call();
  } catch (const std::bad_alloc&) {
    return NO_MEMORY;
  }
}

}  // namespace

// Each gives 0: done. 1: done, and a result is not finite. 2: out of memory.
PARTITA_API int32_t partita_forward(const PartitaProblem* p, const PartitaSums* to) {
  return guarded([&] { return run_forward(*p, *to); });
}

// Where only addresses and the scale differ from an earlier call: `p` and `to` hold the rest.
PARTITA_API int32_t partita_attention(const PartitaProblem* geometry, const PartitaSums* outputs,
                                      const PartitaAttention* call) {
  return guarded([&] {
    PartitaProblem p = *geometry;
    PartitaSums to = *outputs;
    double wide = call->scale;
    float narrow = static_cast<float>(call->scale);
    p.query.data = call->query;
    p.key.data = call->key;
    p.value.data = call->value;
    p.scale.data = p.dtype == PARTITA_FLOAT64 ? static_cast<void*>(&wide) : &narrow;
    to.moment = call->mean;
    to.stats = call->stats;
    to.count = call->count;
    to.target_score = call->first;
    return run_forward(p, to);
  });
}

PARTITA_API int32_t partita_backward(const PartitaProblem* given, const PartitaGradients* g) {
  return guarded([&] {
    const PartitaProblem p = with_useful_threads(*given);
    BackwardStorage storage;
    const BackwardPlan plan = make_backward_plan(p, *g, choice().kernels->backward_tuning(p), storage);
    return choice().kernels->backward(p, plan, *g);
  });
}

PARTITA_API int32_t partita_softmax_rows(const PartitaSoftmaxRows* r) { return choice().kernels->softmax_rows(*r); }

PARTITA_API int32_t partita_logits(const PartitaLogits* l) { return choice().kernels->logits(*l); }

PARTITA_API int32_t partita_received(const PartitaProblem* p, const PartitaColumns* c) {
  return choice().kernels->received(with_useful_threads(*p), *c);
}

PARTITA_API int32_t partita_top(const PartitaProblem* p, const PartitaTop* to) {
  return choice().kernels->top(with_useful_threads(*p), *to);
}

PARTITA_API int32_t partita_gaps(const PartitaProblem* p, const PartitaGaps* g) {
  return choice().kernels->gaps(with_useful_threads(*p), *g);
}

PARTITA_API int32_t partita_divergence_rows(const PartitaDivergenceRows* d) {
  return choice().kernels->divergence_rows(*d);
}

PARTITA_API int32_t partita_statistics(const PartitaStatistics* s) {
  choice().kernels->accumulate_statistics(*s);
  return FINITE;
}
