// Sixteen lanes at a time: one AVX-512 register or two of AVX2. Every lane does the same operations
// in the same order on both, so results differ by nothing but what the machine's FMA rounds.
#pragma once
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <utility>

#if defined(__AVX512F__) && defined(__AVX512BW__)

struct F16 {  // 16 float32
  __m512 v;
};
inline F16 zero() { return {_mm512_setzero_ps()}; }
inline F16 all(float x) { return {_mm512_set1_ps(x)}; }
inline F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline F16 broadcast(const float* p) { return all(*p); }  // an operand of the FMA itself
inline F16 load(const uint16_t* p) {  // bf16
  return {_mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
inline void store(float* p, F16 a) { _mm512_storeu_ps(p, a.v); }
inline F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F16 operator+(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F16 operator-(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F16 operator*(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F16 operator/(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F16 max(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F16 abs(F16 a) { return {_mm512_abs_ps(a.v)}; }
inline F16 nearest(F16 a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline F16 power_of_two(F16 n) {  // 2^n for whole n in [-126, 127]
  __m512i e = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(e, 23))};
}

using Ints = int32_t __attribute__((vector_size(64)));  // as __m512i the sums would leave their registers
struct I16 {  // 16 int32
  Ints v;
};
inline I16 zero_int() { return {Ints{}}; }
inline F16 to_float(I16 a) { return {_mm512_cvtepi32_ps((__m512i)a.v)}; }
inline I16 load_int(const int32_t* p) { return {(Ints)_mm512_loadu_si512(p)}; }
inline I16 operator-(I16 a, I16 b) { return {a.v - b.v}; }

struct Packed16 {  // of each lane a few narrow whole numbers, side by side
  __m512i v;
};
inline Packed16 broadcast_packed(const void* x) {
  int32_t group;
  __builtin_memcpy(&group, x, 4);
  return {_mm512_set1_epi32(group)};
}
inline void store_whole(int16_t* p, F16 x) {  // rounded to nearest even
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(x.v)));
}

struct Pairs {  // products of pairs are summed in 32 bits: nothing saturates
  static constexpr int inner = 2, offset = 0;
  using Activation = int16_t;
  static Packed16 weights(const int8_t* p) {
    return {_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p))};
  }
  static I16 dot(I16 sum, Packed16 x, Packed16 w) {
#if defined(__AVX512VNNI__)
    return {(Ints)_mm512_dpwssd_epi32((__m512i)sum.v, x.v, w.v)};
#else
    return {sum.v + (Ints)_mm512_madd_epi16(x.v, w.v)};
#endif
  }
};
#if defined(__AVX512VNNI__)
struct Quads {
  static constexpr int inner = 4, offset = 128;  // the instruction multiplies unsigned by signed
  using Activation = uint8_t;
  static Packed16 weights(const int8_t* p) { return {_mm512_loadu_si512(p)}; }
  static I16 dot(I16 sum, Packed16 x, Packed16 w) {
    return {(Ints)_mm512_dpbusd_epi32((__m512i)sum.v, x.v, w.v)};
  }
};
inline void store_whole(uint8_t* p, F16 x) {
  const __m512i whole = _mm512_add_epi32(_mm512_cvtps_epi32(x.v), _mm512_set1_epi32(Quads::offset));
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(whole));
}
using ForInt8 = Quads;  // activations of 8 bits
#else
using ForInt8 = Pairs;
#endif
constexpr int SUMS = 24, MOST_TOKENS = 12;  // of a tile: sums of 16 lanes that fit the registers
constexpr int STREAMED_SUMS = 12;            // and that hide the latency of one
constexpr int MOST_STREAMED = 18;            // of float32, where reading weights takes longer than products
constexpr bool ROOM_FOR_WEIGHTS = true;      // of all panels of a tile beside its sums

#elif defined(__AVX2__) && defined(__FMA__)

struct F16 {
  __m256 a, b;
};
inline F16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F16 all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline __m256 widen_bf16(const uint16_t* p) {
  return _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
// One value to all lanes, in program order: compilers like to load for many tokens first, and then
// have no registers left for the sums.
inline F16 broadcast(const float* p) {
  __m256 v;
  asm volatile("vbroadcastss %1, %0" : "=x"(v) : "m"(*p));
  return {v, v};
}
inline F16 load(const uint16_t* p) { return {widen_bf16(p), widen_bf16(p + 8)}; }
inline void store(float* p, F16 x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline F16 fma(F16 x, F16 y, F16 z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline F16 operator+(F16 x, F16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F16 operator-(F16 x, F16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F16 operator*(F16 x, F16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F16 operator/(F16 x, F16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F16 max(F16 x, F16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F16 abs(F16 x) {
  __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
inline F16 nearest(F16 x) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
inline __m256 power_of_two(__m256 n) {
  __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(e, 23));
}
inline F16 power_of_two(F16 n) { return {power_of_two(n.a), power_of_two(n.b)}; }

using Ints = int32_t __attribute__((vector_size(32)));  // as __m256i the sums would leave their registers
struct I16 {
  Ints a, b;
};
inline I16 zero_int() { return {Ints{}, Ints{}}; }
inline F16 to_float(I16 x) {
  return {_mm256_cvtepi32_ps((__m256i)x.a), _mm256_cvtepi32_ps((__m256i)x.b)};
}
inline I16 load_int(const int32_t* p) {
  return {(Ints)_mm256_loadu_si256((const __m256i*)p),
          (Ints)_mm256_loadu_si256((const __m256i*)(p + 8))};
}
inline I16 operator-(I16 x, I16 y) { return {x.a - y.a, x.b - y.b}; }

struct Packed16 {
  __m256i a, b;
};
using Group = int32_t __attribute__((may_alias));
inline Packed16 broadcast_packed(const void* x) {  // in program order, as above
  __m256i group;
  asm volatile("vpbroadcastd %1, %0" : "=x"(group) : "m"(*(const Group*)x));
  return {group, group};
}
inline void store_whole(int16_t* p, F16 x) {
  const __m256i mixed = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(mixed, 0xd8));
}

struct Pairs {
  static constexpr int inner = 2, offset = 0;
  using Activation = int16_t;
  static Packed16 weights(const int8_t* p) {
    return {_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)),
            _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(p + 16)))};
  }
  static I16 dot(I16 sum, Packed16 x, Packed16 w) {
    return {sum.a + (Ints)_mm256_madd_epi16(x.a, w.a), sum.b + (Ints)_mm256_madd_epi16(x.b, w.b)};
  }
};
using ForInt8 = Pairs;
constexpr int SUMS = 6, MOST_TOKENS = 6, STREAMED_SUMS = 6, MOST_STREAMED = 6;
constexpr bool ROOM_FOR_WEIGHTS = false;

#else
#error "these kernels are written for AVX2 with FMA, or AVX-512 with BW"
#endif

constexpr int LANES = 16, CACHE_LINE = 64;

#define INLINED __attribute__((always_inline))

// work(0), ..., work(N - 1) with constant indices, so that arrays of registers stay in registers.
template <int N, class Work>
INLINED inline void repeat(Work&& work) {
  [&]<int... I>(std::integer_sequence<int, I...>) INLINED {
    (work(std::integral_constant<int, I>{}), ...);
  }(std::make_integer_sequence<int, N>{});
}

inline float sum(F16 x) {  // in one fixed order
  float lanes[LANES];
  store(lanes, x);
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
  return lanes[0];
}

inline float largest(F16 x) {
  float lanes[LANES];
  store(lanes, x);
  float top = lanes[0];
  for (int i = 1; i < LANES; i++) top = lanes[i] > top ? lanes[i] : top;
  return top;
}

// e^x to 2 units in the last place; 0 below -87.7, NaN stays NaN. x <= 88.
inline F16 exp(F16 x) {
  x = max(all(-88.0f), x);  // of NaN and a number the second is taken; 2^-127 has the bits of 0
  F16 n = nearest(x * all(1.44269504088896341f));
  F16 r = fma(n, all(-0.693359375f), x);
  r = fma(n, all(2.12194440e-4f), r);
  F16 p = all(1.9875691500e-4f);
  p = fma(p, r, all(1.3981999507e-3f));
  p = fma(p, r, all(8.3334519073e-3f));
  p = fma(p, r, all(4.1665795894e-2f));
  p = fma(p, r, all(1.6666665459e-1f));
  p = fma(p, r, all(5.0000001201e-1f));
  p = fma(p, r * r, r + all(1.0f));
  return p * power_of_two(n);
}

inline uint16_t to_bf16(float x) {  // round to nearest even, as torch does; NaN stays NaN
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  if (std::isnan(x)) return 0x7fc0;
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
