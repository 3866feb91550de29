// What a pass meets in practice: half precision, a scale for each row, softcap, bias, masks, segments, intervals, rows
// that see nothing, several threads; and the reads that walk over the scores once more: received mass, the best keys,
// keys within a gap, sums over rows.
#include <cstring>

#include "check.h"

namespace {

constexpr double NONE = -std::numeric_limits<double>::infinity();

// Numbers every storage dtype holds exactly, so that the reference may start from them.
template <class A>
std::vector<A> coarse(std::mt19937& source, size_t n) {
  std::vector<A> out = drawn<A>(source, n);
  for (A& x : out) x = std::round(std::min(A(3.9), std::max(A(-3.9), x)) * 32) / 32;
  return out;
}

// The bits of such a number in sixteen of them.
uint16_t halved(float x, int32_t dtype) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (dtype == PARTITA_BFLOAT16 || x == 0) return static_cast<uint16_t>(bits >> 16);
  return static_cast<uint16_t>((bits >> 16 & 0x8000) | (((bits >> 23 & 0xff) - 112) << 10) | (bits >> 13 & 0x3ff));
}

// The nearest bfloat16 number; of two, the even one.
float rounded(double x) {
  const float wide = static_cast<float>(x);
  uint32_t bits;
  std::memcpy(&bits, &wide, 4);
  bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

struct Sizes {
  int64_t B, Q, K, D, V;
};

template <class A>
struct Case {
  Sizes n;
  int32_t dtype;
  bool masked;
  double softcap;
  std::vector<A> query, key, value, scale, bias;
  std::vector<uint16_t> stored[3];
  std::vector<int32_t> start, stop, query_segment, key_segment, skip;
  std::vector<uint8_t> mask;
  std::vector<int64_t> zero, by_query, by_key, by_value, by_row, by_column;

  Case(Sizes n, int32_t dtype, bool masked, double softcap) : n(n), dtype(dtype), masked(masked), softcap(softcap) {
    std::mt19937 source(23);
    query = coarse<A>(source, n.B * n.Q * n.D), key = coarse<A>(source, n.B * n.K * n.D);
    value = coarse<A>(source, n.B * n.K * n.V), bias = drawn<A>(source, n.Q * n.K);
    for (int64_t i = 0; i < n.B * n.Q; ++i) scale.push_back(static_cast<A>((1 + i % 3) / std::sqrt(double(n.D))));
    for (int64_t i = 0; i < n.B * n.Q; ++i) {
      start.push_back(static_cast<int32_t>(i % 5)), stop.push_back(static_cast<int32_t>(n.K - i % 7));
      query_segment.push_back(static_cast<int32_t>(i % 2)), skip.push_back(static_cast<int32_t>(i * 7 % n.K));
    }
    for (int64_t j = 0; j < n.B * n.K; ++j) key_segment.push_back(static_cast<int32_t>(j % 3 % 2));
    for (int64_t i = 0; i < n.Q; ++i)
      for (int64_t j = 0; j < n.K; ++j) mask.push_back(i != 3 && (source() & 7) != 0);  // row 3 sees nothing
    for (int64_t b = 0; b < n.B; ++b) {
      zero.push_back(0), by_row.push_back(b * n.Q), by_column.push_back(b * n.K);
      by_query.push_back(b * n.Q * n.D), by_key.push_back(b * n.K * n.D), by_value.push_back(b * n.K * n.V);
    }
  }

  void* data(std::vector<A>& x, int at) {
    if (dtype < PARTITA_BFLOAT16) return x.data();
    stored[at].clear();
    for (A one : x) stored[at].push_back(halved(static_cast<float>(one), dtype));
    return stored[at].data();
  }

  PartitaProblem problem(int32_t threads) {
    PartitaProblem p{};
    p.B = n.B, p.Q = n.Q, p.K = n.K, p.D = n.D, p.V = n.V, p.dtype = dtype, p.threads = threads;
    p.bias_dtype = sizeof(A) == 4 ? PARTITA_FLOAT32 : PARTITA_FLOAT64;
    p.query = {data(query, 0), by_query.data(), n.D, 1};
    p.key = {data(key, 1), by_key.data(), n.D, 1};
    p.value = {data(value, 2), by_value.data(), n.V, 1};
    p.scale = {scale.data(), by_row.data(), 1, 1};
    if (!masked) return p;
    p.softcap = softcap;
    p.bias = {bias.data(), zero.data(), n.K, 1};
    p.mask = {mask.data(), zero.data(), n.K, 1};
    p.start = {start.data(), by_row.data(), 1, 1};
    p.stop = {stop.data(), by_row.data(), 1, 1};
    p.query_segment = {query_segment.data(), by_row.data(), 1, 1};
    p.key_segment = {key_segment.data(), by_column.data(), 1, 1};
    p.skip = {skip.data(), by_row.data(), 1, 1};
    return p;
  }

  bool visible(int64_t b, int64_t i, int64_t j) const {
    const int64_t r = b * n.Q + i;
    return !masked || (j >= start[r] && j < stop[r] && j != skip[r] && mask[i * n.K + j] &&
                       query_segment[r] == key_segment[b * n.K + j]);
  }

  template <class T>
  T score(int64_t b, int64_t i, int64_t j, T* slope) const {
    T s = 0;  // the query is scaled first: products of coarse numbers would not be rounded at all
    for (int64_t d = 0; d < n.D; ++d)
      s += static_cast<T>(scale[b * n.Q + i]) * static_cast<T>(query[(b * n.Q + i) * n.D + d]) *
           static_cast<T>(key[(b * n.K + j) * n.D + d]);
    *slope = 1;
    if (!masked) return s;
    if (softcap > 0) {
      const T t = std::tanh(s / static_cast<T>(softcap));
      *slope = 1 - t * t;
      s = static_cast<T>(softcap) * t;
    }
    return s + static_cast<T>(bias[i * n.K + j]);
  }
};

// All scores of all rows in type T, and what follows from them.
template <class T>
struct Table {
  std::vector<T> score, slope, peak, mass, first, second;

  template <class A>
  explicit Table(const Case<A>& c) {
    const Sizes& n = c.n;
    score.assign(n.B * n.Q * n.K, T(NONE)), slope.assign(score.size(), 0);
    peak.assign(n.B * n.Q, T(NONE)), mass.assign(n.B * n.Q, 0), first = second = mass;
    for (int64_t r = 0; r < n.B * n.Q; ++r) {
      T* s = &score[r * n.K];
      for (int64_t j = 0; j < n.K; ++j)
        if (c.visible(r / n.Q, r % n.Q, j)) {
          s[j] = c.template score<T>(r / n.Q, r % n.Q, j, &slope[r * n.K + j]);
          peak[r] = std::max(peak[r], s[j]);
        }
      for (int64_t j = 0; j < n.K; ++j)
        if (s[j] > T(NONE)) {
          const T at = s[j] - peak[r], e = std::exp(at);
          mass[r] += e, first[r] += e * at;
        }
      for (int64_t j = 0; j < n.K; ++j)
        if (s[j] > T(NONE)) {
          const T off = s[j] - peak[r] - first[r] / mass[r];
          second[r] += std::exp(s[j] - peak[r]) * off * off;
        }
    }
  }
};

// One case, its scores by the plain formula in the same digits and in more, and what the library made of it.
template <class A>
struct Check {
  const Sizes n;
  Case<A> c;
  const Table<Exact> exact;
  const Table<A> plain;
  const PartitaProblem p;
  const int64_t rows;
  const bool columns;  // sums over rows are wanted too
  double reach = 0;    // the largest score
  std::vector<double> peak, col_peak;
  std::vector<A> mass, first, second, moment, count, stats, col_mass;
  std::vector<int64_t> argmax, by_moment, slot;

  Check(Sizes n, int32_t dtype, bool masked, double softcap, int32_t threads)
      : n(n),
        c(n, dtype, masked, softcap),
        exact(c),
        plain(c),
        p(c.problem(threads)),
        rows(n.B * n.Q),
        columns(n.B == 1),
        peak(rows),
        col_peak(n.K),
        mass(rows),
        first(rows),
        second(rows),
        moment(rows * n.V),
        count(rows),
        stats(5 * rows),
        col_mass(n.K),
        argmax(rows) {
    for (Exact s : exact.score) reach = s > NONE ? std::max(reach, double(std::abs(s))) : reach;
    for (int64_t b = 0; b < n.B; ++b) by_moment.push_back(b * n.Q * n.V), slot.push_back(b);
  }

  void pass();
  void received();
  void best_and_gaps();
  void gradients();
  void plain_attention();
};

template <class A>
void Check<A>::pass() {
  PartitaSums to{};
  to.peak = peak.data(), to.mass = mass.data(), to.first = first.data(), to.second = second.data();
  to.moment = moment.data(), to.count = count.data(), to.stats = stats.data();
  to.argmax = argmax.data();
  to.moment_offset = by_moment.data(), to.moment_row = n.V;
  if (columns) to.col_peak = col_peak.data(), to.col_mass = col_mass.data();
  failures += partita_forward(&p, &to) != 0;

  Error<A> log_z, entropy, mean_score, variance, mean, high;
  int64_t wrong = 0;
  for (int64_t r = 0; r < rows; ++r) {
    int64_t seen = 0;
    for (int64_t j = 0; j < n.K; ++j) seen += exact.score[r * n.K + j] > NONE;
    wrong += count[r] != static_cast<A>(seen);
    if (!seen) {
      wrong += peak[r] != NONE || mass[r] != 0 || argmax[r] != -1;
      for (int64_t v = 0; v < n.V; ++v) wrong += moment[r * n.V + v] != 0;
      continue;
    }
    const auto centred = [&](const auto& t) { return t.first[r] / t.mass[r]; };
    log_z.add(exact.peak[r] + std::log(exact.mass[r]), stats[r], plain.peak[r] + std::log(plain.mass[r]));
    log_z.add(exact.peak[r] + std::log(exact.mass[r]), peak[r] + std::log(Exact(mass[r])),
              plain.peak[r] + std::log(plain.mass[r]));
    entropy.add(std::log(exact.mass[r]) - centred(exact), stats[rows + r], std::log(plain.mass[r]) - centred(plain));
    mean_score.add(exact.peak[r] + centred(exact), stats[2 * rows + r], plain.peak[r] + centred(plain));
    variance.add(exact.second[r] / exact.mass[r], stats[3 * rows + r], plain.second[r] / plain.mass[r]);
    variance.add(exact.second[r] / exact.mass[r], Exact(second[r]) / mass[r], plain.second[r] / plain.mass[r]);
    high.add(exact.peak[r], stats[4 * rows + r], plain.peak[r]);
    // another key may win by a rounding: its score must be the largest all the same
    high.add(exact.peak[r], exact.score[r * n.K + argmax[r]], plain.peak[r]);
    for (int64_t v = 0; v < n.V; ++v) {
      Exact sum = 0;
      A naive = 0;
      for (int64_t j = 0; j < n.K; ++j)
        if (exact.score[r * n.K + j] > NONE) {
          const A at = c.value[(r / n.Q * n.K + j) * n.V + v];
          sum += std::exp(exact.score[r * n.K + j] - exact.peak[r]) * at;
          naive += std::exp(plain.score[r * n.K + j] - plain.peak[r]) * at;
        }
      mean.add(sum / exact.mass[r], Exact(moment[r * n.V + v]) / mass[r], naive / plain.mass[r]);
    }
  }
  log_z.hold("log Z", n.K), entropy.hold("entropy", n.K), mean_score.hold("mean score", n.K);
  variance.hold("variance of the score", n.K), mean.hold("E[value]", n.K, reach);
  high.hold("largest score, and its key", n.D);
  expect("counts and empty rows", wrong);
}

// Column sums, with the peaks and masses of the pass.
template <class A>
void Check<A>::received() {
  std::vector<A> weight(rows), sums(n.B * n.K);
  for (int64_t r = 0; r < rows; ++r) weight[r] = mass[r] > 0 ? 1 / mass[r] : A(5);  // of an empty row: ignored
  const PartitaColumns margin{peak.data(), weight.data(), slot.data(), n.B, sums.data()};
  failures += partita_received(&p, &margin) != 0;
  Error<A> margins, over_rows;
  for (int64_t b = 0; b < n.B; ++b)
    for (int64_t j = 0; j < n.K; ++j) {
      Exact sum = 0, column = 0, top = NONE;
      A naive = 0, column_naive = 0, top_naive = A(NONE);
      for (int64_t r = b * n.Q; r < (b + 1) * n.Q; ++r) {
        top = std::max(top, exact.score[r * n.K + j]);
        top_naive = std::max(top_naive, plain.score[r * n.K + j]);
      }
      for (int64_t r = b * n.Q; r < (b + 1) * n.Q; ++r)
        if (exact.score[r * n.K + j] > NONE) {
          sum += std::exp(exact.score[r * n.K + j] - exact.peak[r]) / exact.mass[r];
          naive += std::exp(plain.score[r * n.K + j] - plain.peak[r]) / plain.mass[r];
          column += std::exp(exact.score[r * n.K + j] - top);
          column_naive += std::exp(plain.score[r * n.K + j] - top_naive);
        }
      margins.add(sum, sums[b * n.K + j], naive);
      if (columns && top > NONE)
        over_rows.add(top + std::log(column), col_peak[j] + std::log(Exact(col_mass[j])),
                      top_naive + std::log(column_naive));
    }
  margins.hold("received mass", n.Q);
  if (columns) over_rows.hold("log Z over the rows", n.Q);
}

template <class A>
void Check<A>::best_and_gaps() {
  constexpr int64_t BEST = 5;
  std::vector<A> best(rows * BEST);
  std::vector<int64_t> where(rows * BEST);
  const PartitaTop ranked{BEST, best.data(), where.data()};
  failures += partita_top(&p, &ranked) != 0;
  const A edge[] = {A(0.25), A(2), A(-NONE)};
  std::vector<int64_t> within(rows * 3);
  const PartitaGaps gaps{3, edge, within.data()};
  failures += partita_gaps(&p, &gaps) != 0;
  Error<A> scores;
  int64_t wrong = 0;
  for (int64_t r = 0; r < rows; ++r) {
    std::vector<Exact> sorted(&exact.score[r * n.K], &exact.score[r * n.K] + n.K);
    std::vector<A> naive(&plain.score[r * n.K], &plain.score[r * n.K] + n.K);
    std::sort(sorted.rbegin(), sorted.rend()), std::sort(naive.rbegin(), naive.rend());
    for (int64_t k = 0; k < BEST; ++k) {
      const int64_t at = where[r * BEST + k];
      if (k >= n.K || sorted[k] == NONE) {
        wrong += at != -1 || best[r * BEST + k] != A(NONE);
        continue;
      }
      scores.add(sorted[k], best[r * BEST + k], naive[k]);
      scores.add(sorted[k], at < 0 ? Exact(NONE) : exact.score[r * n.K + at], naive[k]);
      for (int64_t other = 0; other < k; ++other) wrong += where[r * BEST + other] == at;
    }
    for (int64_t e = 0; e < 3; ++e) {  // a score that rounds over the edge may be counted or not
      const Exact unsure = 64 * std::numeric_limits<A>::epsilon() * (1 + std::abs(exact.peak[r]));
      int64_t fewest = 0, most = 0;
      for (Exact s : sorted)
        if (s > NONE) fewest += exact.peak[r] - s <= edge[e] - unsure, most += exact.peak[r] - s <= edge[e] + unsure;
      wrong += within[r * 3 + e] < fewest || within[r * 3 + e] > most;
    }
  }
  scores.hold("the best scores, and their keys", n.D);
  expect("best keys and gaps", wrong);
}

// ds = slope e (g_mass + g_first (1 + c) + g_second (2c + c^2) + <g_moment, v>), and what goes over rows.
template <class A>
void Check<A>::gradients() {
  std::mt19937 source(29);
  std::vector<A> g_mass = drawn<A>(source, rows), g_first = drawn<A>(source, rows), g_second = drawn<A>(source, rows);
  std::vector<A> g_moment = drawn<A>(source, rows * n.V), g_column = drawn<A>(source, n.K);
  std::vector<A> dq(rows * n.D), dk(n.B * n.K * n.D), dv(n.B * n.K * n.V), ds(rows), db(n.Q * n.K);
  PartitaGradients g{};
  g.group = slot.data(), g.groups = n.B;
  g.peak = peak.data(), g.mass = g_mass.data();
  if (!columns) g.first = g_first.data(), g.second = g_second.data(), g.moment = g_moment.data();
  if (columns) g.col_peak = col_peak.data(), g.col_mass = g_column.data();
  g.query = dq.data(), g.scale = ds.data(), g.key = dk.data();
  if (!columns) g.value = dv.data();
  if (c.masked) g.bias = {db.data(), c.zero.data(), n.K, 1}, g.bias_is_shared = n.B > 1;
  failures += partita_backward(&p, &g) != 0;
  // Where bfloat16 numbers are multiplied in pairs, so is the plain formula: factors rounded, sums in float32.
  const bool pairs = p.dtype == PARTITA_BFLOAT16 && std::strstr(partita_isa(), "bf16");
  const auto differentiate = [&](auto one, const auto& t) {
    using T = decltype(one);
    const auto factor = [&](T x) { return pairs && sizeof(T) == 4 ? static_cast<T>(rounded(x)) : x; };
    std::vector<std::vector<T>> out{std::vector<T>(dq.size()), std::vector<T>(dk.size()), std::vector<T>(dv.size()),
                                    std::vector<T>(ds.size()), std::vector<T>(db.size())};
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t j = 0; j < n.K; ++j) {
        const T s = t.score[r * n.K + j];
        if (!(s > T(NONE))) continue;
        const T at = s - static_cast<T>(peak[r]), e = std::exp(at);
        T inner = static_cast<T>(g_mass[r]);
        if (!columns) inner += static_cast<T>(g_first[r]) * (1 + at) + static_cast<T>(g_second[r]) * (2 + at) * at;
        const int64_t key = (r / n.Q) * n.K + j;
        for (int64_t v = 0; v < n.V && !columns; ++v) {  // with sums over rows only masses are differentiated
          const T up = factor(static_cast<T>(g_moment[r * n.V + v]));
          inner += up * static_cast<T>(c.value[key * n.V + v]);
          out[2][key * n.V + v] += factor(e) * up;
        }
        T d = e * inner;
        if (columns) d += std::exp(s - static_cast<T>(col_peak[j])) * static_cast<T>(g_column[j]);
        out[4][(r % n.Q) * n.K + j] += d;
        d *= t.slope[r * n.K + j];
        T product = 0;
        for (int64_t f = 0; f < n.D; ++f) {
          const T q = static_cast<T>(c.query[r * n.D + f]), k = static_cast<T>(c.key[key * n.D + f]);
          out[0][r * n.D + f] += factor(d) * static_cast<T>(c.scale[r]) * k;
          out[1][key * n.D + f] += factor(d * static_cast<T>(c.scale[r])) * q;
          product += q * k;
        }
        out[3][r] += d * product;
      }
    return out;
  };
  const auto right = differentiate(Exact(0), exact);
  const auto naive = differentiate(A(0), plain);
  const std::vector<A>* ours[] = {&dq, &dk, &dv, &ds, &db};
  const char* of[] = {"gradient of the query", "gradient of the key", "gradient of the value", "gradient of the scale",
                      "gradient of the bias"};
  for (int which = 0; which < (c.masked ? 5 : 4); ++which) {
    Error<A> error;
    for (size_t k = 0; k < ours[which]->size(); ++k) error.add(right[which][k], (*ours[which])[k], naive[which][k]);
    error.hold(of[which], n.K, reach);
  }
}

// Geometry once, addresses and one scale with each call.
template <class A>
void Check<A>::plain_attention() {
  PartitaProblem geometry = p;
  geometry.scale = {nullptr, c.zero.data(), 0, 1};
  PartitaSums shape{};
  shape.mean = 1, shape.forward_only = 1, shape.moment_offset = by_moment.data(), shape.moment_row = n.V;
  const double one_scale = 0.25;
  for (A& x : c.scale) x = static_cast<A>(one_scale);
  const Table<Exact> again(c);
  const Table<A> again_plain(c);
  std::vector<A> sink(rows);
  PartitaAttention call{one_scale,     p.query.data, p.key.data,   p.value.data,
                        moment.data(), stats.data(), count.data(), sink.data()};
  failures += partita_attention(&geometry, &shape, &call) != 0;
  Error<A> attended, scored;
  for (int64_t r = 0; r < rows; ++r) {
    scored.add(again.score[r * n.K], sink[r], again_plain.score[r * n.K]);
    for (int64_t v = 0; v < n.V; ++v) {
      Exact sum = 0;
      A rough = 0;
      for (int64_t j = 0; j < n.K; ++j) {
        const A at = c.value[(r / n.Q * n.K + j) * n.V + v];
        sum += std::exp(again.score[r * n.K + j] - again.peak[r]) * at;
        rough += std::exp(again_plain.score[r * n.K + j] - again_plain.peak[r]) * at;
      }
      attended.add(sum / again.mass[r], moment[r * n.V + v], rough / again_plain.mass[r]);
    }
  }
  attended.hold("plain attention", n.K);
  scored.hold("score of key 0", n.K);
}

template <class A>
void check_case(const char* name, Sizes n, int32_t dtype, bool masked, double softcap, int32_t threads) {
  std::printf("supports, %s, %d x %d x %d, %d threads%s%s\n", name, int(n.B), int(n.Q), int(n.K), int(threads),
              masked ? ", masks, segments, intervals, bias" : "", softcap > 0 ? ", softcap" : "");
  Check<A> check(n, dtype, masked, softcap, threads);
  check.pass();
  check.received();
  check.best_and_gaps();
  check.gradients();
  if (!masked && dtype <= PARTITA_FLOAT64) check.plain_attention();
}

}  // namespace

void check_supports() {
  const Sizes wide{2, 45, 211, 37, 19}, flat{1, 61, 150, 24, 8}, decode{3, 1, 3000, 64, 32};
  check_case<float>("float32", wide, PARTITA_FLOAT32, true, 0, 1);
  check_case<float>("float32", wide, PARTITA_FLOAT32, true, 5, 3);
  check_case<float>("float32", flat, PARTITA_FLOAT32, false, 0, 3);
  check_case<float>("float32", flat, PARTITA_FLOAT32, true, 0, 2);
  check_case<float>("float32", decode, PARTITA_FLOAT32, false, 0, 2);
  check_case<double>("float64", wide, PARTITA_FLOAT64, true, 5, 2);
  check_case<double>("float64", wide, PARTITA_FLOAT64, false, 0, 3);
  for (bool masked : {false, true}) {
    check_case<float>("bfloat16", wide, PARTITA_BFLOAT16, masked, 0, 2);
    check_case<float>("float16", wide, PARTITA_FLOAT16, masked, 0, 2);
  }
}
