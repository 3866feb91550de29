// The C interface: picks the instruction set once, plans a call, runs it.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "kernels.h"
#include "planner.h"

#if defined(PARTITA_HAS_NEON) && defined(PARTITA_HAS_PAIRS)
#if defined(__APPLE__)
#include <sys/sysctl.h>
#else
#include <sys/auxv.h>
#endif
#endif

namespace partita {
namespace {

#if defined(PARTITA_HAS_NEON) && defined(PARTITA_HAS_PAIRS)
bool arm_has_pairs() {
#if defined(__APPLE__)
  int32_t has = 0;
  size_t size = sizeof(has);
  return !sysctlbyname("hw.optional.arm.FEAT_BF16", &has, &size, nullptr, 0) && has;
#else
  return getauxval(AT_HWCAP2) >> 14 & 1;  // HWCAP2_BF16
#endif
}
#endif

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
#ifdef PARTITA_HAS_PAIRS
  const bool pairs = avx512 && __builtin_cpu_supports("avx512bf16");
  if (pairs && (any || !std::strcmp(wanted, "avx512_bf16"))) return {&avx512_bf16::kernels, "avx512_bf16"};
#endif
  if (avx512 && (any || !std::strncmp(wanted, "avx512", 6))) return {&avx512::kernels, "avx512"};
  if (avx2 && (any || std::strcmp(wanted, "baseline"))) return {&avx2::kernels, "avx2"};
#elif defined(PARTITA_HAS_NEON)
#ifdef PARTITA_HAS_PAIRS
  if (arm_has_pairs() && (any || !std::strcmp(wanted, "neon_bf16"))) return {&neon_bf16::kernels, "neon_bf16"};
#endif
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
PARTITA_API int32_t partita_version() { return 11; }

PARTITA_API const char* partita_isa() { return choice().name; }

namespace {

// Waking a thread and waiting for it costs microseconds, on a busy machine a time slice: there must be work for it.
constexpr double WORTH_A_THREAD = 1 << 17;  // products, for each: two to ten microseconds

int32_t useful_threads(int32_t threads, double work) {
  return static_cast<int32_t>(std::max(1.0, std::min<double>(threads, work / WORTH_A_THREAD)));
}

PartitaProblem with_useful_threads(const PartitaProblem& given) {
  PartitaProblem p = given;
  const double rows = static_cast<double>(p.B * p.Q), keys = static_cast<double>(p.K);
  p.threads = useful_threads(p.threads, rows * keys * static_cast<double>(p.D + p.V));
  return p;
}

// An exponential takes the time of this many products; a key of a divergence has two.
constexpr double EXPONENTIAL = 16;

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

PARTITA_API int32_t partita_softmax_rows(const PartitaSoftmaxRows* given) {
  PartitaSoftmaxRows r = *given;
  r.threads = useful_threads(r.threads, EXPONENTIAL * static_cast<double>(r.rows * r.cols));
  return choice().kernels->softmax_rows(r);
}

namespace {

PartitaLogits with_useful_threads(const PartitaLogits& given) {
  PartitaLogits l = given;
  l.threads = useful_threads(l.threads, static_cast<double>(l.rows * l.classes) * static_cast<double>(l.dim));
  return l;
}

}  // namespace

PARTITA_API int32_t partita_logits(const PartitaLogits* l) { return choice().kernels->logits(with_useful_threads(*l)); }

PARTITA_API int32_t partita_input_gradient(const PartitaLogits* l) {
  return choice().kernels->input_gradient(with_useful_threads(*l));
}

PARTITA_API int32_t partita_weight_gradient(const PartitaLogits* l) {
  return choice().kernels->weight_gradient(with_useful_threads(*l));
}

PARTITA_API int32_t partita_received(const PartitaProblem* p, const PartitaColumns* c) {
  return choice().kernels->received(with_useful_threads(*p), *c);
}

PARTITA_API int32_t partita_top(const PartitaProblem* p, const PartitaTop* to) {
  return choice().kernels->top(with_useful_threads(*p), *to);
}

PARTITA_API int32_t partita_gaps(const PartitaProblem* p, const PartitaGaps* g) {
  return choice().kernels->gaps(with_useful_threads(*p), *g);
}

PARTITA_API int32_t partita_divergence_rows(const PartitaDivergenceRows* given) {
  PartitaDivergenceRows d = *given;
  d.threads = useful_threads(d.threads, 2 * EXPONENTIAL * static_cast<double>(d.rows * d.cols));
  return choice().kernels->divergence_rows(d);
}
