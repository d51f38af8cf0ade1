// AVX-512 for processors without it: the instructions that csrc/vec.h uses, lane by lane as the
// vendor's manual defines them. Found before the compiler's own header by -I.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

typedef float __m512 __attribute__((vector_size(64)));
typedef long long __m512i __attribute__((vector_size(64)));
typedef long long __m256i __attribute__((vector_size(32)));
typedef long long __m128i __attribute__((vector_size(16)));

template <class T>
struct Lanes {
  T at[64 / sizeof(T)] = {};
};
template <class T, class V>
Lanes<T> lanes(const V& vector) {
  Lanes<T> out;
  std::memcpy(&out, &vector, sizeof vector);
  return out;
}
template <class V, class T>
V vector(const Lanes<T>& lanes) {
  V out;
  std::memcpy(&out, &lanes, sizeof out);
  return out;
}
template <class To, class From, int N, class V>
__m512i widen(const V& narrow) {
  Lanes<To> out;
  for (int i = 0; i < N; i++) out.at[i] = lanes<From>(narrow).at[i];
  return vector<__m512i>(out);
}
template <class To, class V>
V narrow(__m512i wide) {
  Lanes<To> out;
  for (int i = 0; i < 16; i++) out.at[i] = (To)lanes<int32_t>(wide).at[i];
  V first;
  std::memcpy(&first, &out, sizeof first);
  return first;
}
template <class F>
__m512 each(__m512 a, F f) {
  for (int i = 0; i < 16; i++) a[i] = f(a[i]);
  return a;
}

inline __m512 _mm512_setzero_ps() { return __m512{}; }
inline __m512 _mm512_set1_ps(float x) { return each(__m512{}, [=](float) { return x; }); }
inline __m512 _mm512_loadu_ps(const void* p) {
  __m512 out;
  std::memcpy(&out, p, 64);
  return out;
}
inline void _mm512_storeu_ps(void* p, __m512 a) { std::memcpy(p, &a, 64); }
inline __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
  for (int i = 0; i < 16; i++) c[i] = std::fmaf(a[i], b[i], c[i]);
  return c;
}
inline __m512 _mm512_add_ps(__m512 a, __m512 b) { return a + b; }
inline __m512 _mm512_sub_ps(__m512 a, __m512 b) { return a - b; }
inline __m512 _mm512_mul_ps(__m512 a, __m512 b) { return a * b; }
inline __m512 _mm512_div_ps(__m512 a, __m512 b) { return a / b; }
inline __m512 _mm512_max_ps(__m512 a, __m512 b) {
  for (int i = 0; i < 16; i++) a[i] = a[i] > b[i] ? a[i] : b[i];
  return a;
}
inline __m512 _mm512_abs_ps(__m512 a) { return each(a, [](float x) { return std::fabs(x); }); }
constexpr int _MM_FROUND_TO_NEAREST_INT = 0, _MM_FROUND_NO_EXC = 8;
inline __m512 _mm512_roundscale_ps(__m512 a, int) {
  return each(a, [](float x) { return std::nearbyint(x); });
}

inline __m512i _mm512_loadu_si512(const void* p) {
  __m512i out;
  std::memcpy(&out, p, 64);
  return out;
}
inline __m256i _mm256_loadu_si256(const void* p) {
  __m256i out;
  std::memcpy(&out, p, 32);
  return out;
}
inline void _mm256_storeu_si256(void* p, __m256i a) { std::memcpy(p, &a, 32); }
inline void _mm_storeu_si128(void* p, __m128i a) { std::memcpy(p, &a, 16); }
inline __m512i _mm512_set1_epi32(int x) {
  Lanes<int32_t> out;
  for (int32_t& lane : out.at) lane = x;
  return vector<__m512i>(out);
}
inline __m512i _mm512_cvtepu16_epi32(__m256i a) { return widen<int32_t, uint16_t, 16>(a); }
inline __m512i _mm512_cvtepi8_epi16(__m256i a) { return widen<int16_t, int8_t, 32>(a); }
inline __m256i _mm512_cvtepi32_epi16(__m512i a) { return narrow<int16_t, __m256i>(a); }
inline __m128i _mm512_cvtepi32_epi8(__m512i a) { return narrow<int8_t, __m128i>(a); }
inline __m512i _mm512_slli_epi32(__m512i a, int bits) {
  auto out = lanes<uint32_t>(a);
  for (uint32_t& lane : out.at) lane <<= bits;
  return vector<__m512i>(out);
}
inline __m512i _mm512_add_epi32(__m512i a, __m512i b) {
  auto x = lanes<uint32_t>(a), y = lanes<uint32_t>(b);
  for (int i = 0; i < 16; i++) x.at[i] += y.at[i];
  return vector<__m512i>(x);
}
inline __m512 _mm512_castsi512_ps(__m512i a) { return (__m512)a; }
inline __m512i _mm512_cvtps_epi32(__m512 a) {
  Lanes<int32_t> out;
  for (int i = 0; i < 16; i++) out.at[i] = (int32_t)std::nearbyint(a[i]);
  return vector<__m512i>(out);
}
inline __m512 _mm512_cvtepi32_ps(__m512i a) {
  __m512 out;
  for (int i = 0; i < 16; i++) out[i] = (float)lanes<int32_t>(a).at[i];
  return out;
}
inline __m512i _mm512_madd_epi16(__m512i a, __m512i b) {
  auto x = lanes<int16_t>(a), y = lanes<int16_t>(b);
  Lanes<int32_t> out;
  for (int i = 0; i < 32; i++) out.at[i / 2] += x.at[i] * y.at[i];
  return vector<__m512i>(out);
}
inline __m512i _mm512_dpbusd_epi32(__m512i sum, __m512i a, __m512i b) {
  auto out = lanes<int32_t>(sum);
  auto x = lanes<uint8_t>(a);
  auto y = lanes<int8_t>(b);
  for (int i = 0; i < 64; i++) out.at[i / 4] += x.at[i] * y.at[i];
  return vector<__m512i>(out);
}
inline __m512i _mm512_dpwssd_epi32(__m512i sum, __m512i a, __m512i b) {
  return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
}
#define _mm_pause() __builtin_ia32_pause()
