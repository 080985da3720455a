// The floating-point mode in which the stored bytes are defined.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace gact {
namespace {

// Standard rounding, subnormals kept: torch.set_flush_denormal must not change the stored bytes.
class StandardFloatMode {
 public:
#if defined(__x86_64__)
  StandardFloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80u); }
  ~StandardFloatMode() { _mm_setcsr(saved_); }

 private:
  unsigned int saved_;
#endif
};

}  // namespace
}  // namespace gact
