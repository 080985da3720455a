// Runs PTX on a CPU, written from NVIDIA's "PTX ISA" manual and sharing nothing with csrc/ or the emulated warp.
//
// A thread is a program counter and registers. It runs until it has to wait for others: at a barrier, a shuffle or a
// vote. Shadow memory knows for every byte of shared and global memory who wrote it and who read it last. Only
// bar.sync and bar.warp.sync order the accesses of different threads (shuffles and votes do not: "Memory Consistency
// Model"), and whatever they leave unordered is reported as a race, in whichever order the threads happened to run.
//
// program.py writes the programs. Every operand is the number of a register, or minus one minus that of a constant.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <vector>

namespace {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i8 = int8_t;
using i16 = int16_t;
using i32 = int32_t;
using i64 = int64_t;

constexpr u32 kLanes = 32;
constexpr u64 kSharedBytes = 227 * 1024;
constexpr u8 kGarbage = 0xA5;  // what memory and registers hold before they are written
constexpr u32 kMany = ~0u;

[[noreturn]] void fail(const std::string& message) { throw std::runtime_error(message); }

// ---- threads

struct Thread;
using Handler = void (*)(Thread&, const int*);

enum class Kind { kPlain, kBranch, kExit, kWarpBarrier, kBlockBarrier, kShuffle, kVote };

struct Operation {
  Kind kind;
  int operands;
  Handler run;
};

struct Instruction {
  const Operation* operation;
  std::string opcode;
  int guard;  // register of the predicate, or -1
  bool negated;
  int operands[12];
};

struct Thread {
  u64* registers;
  const u64* constants;
  u8* local;
  const i64* arguments;
  u32 number, pc;
  u32 block_phase, warp_phase;  // barriers passed
  bool waits, ended;
};

u64 raw(const Thread& t, int operand) { return operand >= 0 ? t.registers[operand] : t.constants[-1 - operand]; }

// Registers hold bits; whoever reads one takes as many as its type has.
template <class T>
T get(const Thread& t, int operand) {
  const u64 bits = raw(t, operand);
  T value;
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

template <class T>
void put(Thread& t, int operand, T value) {
  u64 bits = 0;
  if constexpr (std::is_integral_v<T> && std::is_signed_v<T>) {
    bits = static_cast<u64>(static_cast<i64>(value));
  } else {
    std::memcpy(&bits, &value, sizeof(T));
  }
  t.registers[operand] = bits;
}

// ---- memory

struct Access {
  u32 block, block_phase, warp_phase, thread, pc;
};

// The last write of a byte, and its reads since: of the last phase of the block, and there of the last phase of the
// warp. Earlier reads are ordered before everything that follows, as a barrier lets no thread pass before all arrive.
struct Cell {
  u32 launch = 0;
  bool written = false, read = false;
  Access write, reads;
  u32 reading_warp;

  void forget() { written = read = false; }
};

constexpr u64 kPage = 4096, kRecentPages = 64;

struct Machine {
  u32 launch = 0, block = 0, blocks = 0, threads = 0;
  u64 shared_bytes = 0;
  alignas(128) u8 shared[kSharedBytes];
  std::unordered_map<u64, std::unique_ptr<Cell[]>> pages;
  u64 recent_pages[kRecentPages];
  Cell* recent_cells[kRecentPages] = {};
  i64 races = 0, accesses = 0;
  std::string report;
  std::string error;
};

Machine machine;

Cell& cell_at(u64 address) {
  const u64 page = address / kPage;
  const u64 slot = page % kRecentPages;
  if (page != machine.recent_pages[slot] || machine.recent_cells[slot] == nullptr) {
    std::unique_ptr<Cell[]>& cells = machine.pages[page];
    if (cells == nullptr) cells.reset(new Cell[kPage]);
    machine.recent_pages[slot] = page;
    machine.recent_cells[slot] = cells.get();
  }
  Cell& cell = machine.recent_cells[slot][address % kPage];
  if (cell.launch != machine.launch) {
    cell.forget();
    cell.launch = machine.launch;
  }
  return cell;
}

bool in_shared(u64 address) {
  const u64 start = reinterpret_cast<u64>(machine.shared);
  return address >= start && address < start + kSharedBytes;
}

void report_race(const char* kind, const Access& before, const Access& now, u64 address) {
  if (machine.races++ >= 4) return;
  std::ostringstream text;
  const bool shared = in_shared(address);
  text << kind << " in " << (shared ? "shared" : "global") << " memory at ";
  text << (shared ? address - reinterpret_cast<u64>(machine.shared) : address) << ": thread ";
  if (before.thread == kMany)
    text << "several";
  else
    text << before.thread;
  text << " of block " << before.block << " in instruction " << before.pc << ", thread " << now.thread << " of block ";
  text << now.block << " in instruction " << now.pc << "\n";
  machine.report += text.str();
}

bool ordered(const Access& before, const Access& now) {
  if (before.block != now.block) return false;
  if (before.thread == now.thread || before.block_phase < now.block_phase) return true;
  return before.thread / kLanes == now.thread / kLanes && before.warp_phase < now.warp_phase;
}

bool reads_ordered(const Cell& cell, const Access& now) {
  const Access& reads = cell.reads;
  if (reads.block != now.block) return false;
  if (reads.block_phase < now.block_phase) return true;
  if (cell.reading_warp != now.thread / kLanes) return false;
  return reads.warp_phase < now.warp_phase || reads.thread == now.thread;
}

void note_read(Cell& cell, const Access& now) {
  const u32 warp = now.thread / kLanes;
  Access& reads = cell.reads;
  if (cell.read && reads.block != now.block) {
    reads.block = kMany;
    return;
  }
  if (!cell.read || reads.block_phase < now.block_phase) {
    cell.read = true;
    reads = now;
    cell.reading_warp = warp;
    return;
  }
  if (cell.reading_warp != warp) {
    cell.reading_warp = kMany;
  } else if (reads.warp_phase < now.warp_phase) {
    reads = now;
  } else if (reads.thread != now.thread) {
    reads.thread = kMany;
  }
}

void touch(const Thread& t, u64 address, u32 size, bool write) {
  const Access now{machine.block, t.block_phase, t.warp_phase, t.number, t.pc};
  ++machine.accesses;
  for (u64 at = address; at < address + size; ++at) {
    Cell& cell = cell_at(at);
    if (cell.written && !ordered(cell.write, now))
      report_race(write ? "write, write" : "write, read", cell.write, now, at);
    if (!write) {
      note_read(cell, now);
      continue;
    }
    if (cell.read && !reads_ordered(cell, now)) report_race("read, write", cell.reads, now, at);
    cell.read = false;
    cell.written = true;
    cell.write = now;
  }
}

enum class Space { kGeneric, kGlobal, kShared, kLocal };

// The address on this machine, after the checks that a GPU makes: alignment, and the end of shared memory.
u8* place_of(const Thread& t, Space space, u64 address, u32 size, bool write) {
  if (address % size != 0) fail("an access of " + std::to_string(size) + " bytes is not aligned");
  if (space == Space::kLocal) return t.local + address;
  if (space == Space::kShared) address += reinterpret_cast<u64>(machine.shared);
  if (in_shared(address)) {
    if (address + size > reinterpret_cast<u64>(machine.shared) + machine.shared_bytes) fail("beyond shared memory");
  } else if (space == Space::kShared) {
    fail("beyond shared memory");
  }
  touch(t, address, size, write);
  return reinterpret_cast<u8*>(address);
}

// Operands: the elements, base, offset.
template <class T, Space SPACE, int COUNT>
void load(Thread& t, const int* o) {
  const u64 address = get<u64>(t, o[COUNT]) + get<u64>(t, o[COUNT + 1]);
  T values[COUNT];
  std::memcpy(values, place_of(t, SPACE, address, sizeof(values), false), sizeof(values));
  for (int i = 0; i < COUNT; ++i) put<T>(t, o[i], values[i]);
}

template <class T, Space SPACE, int COUNT>
void store(Thread& t, const int* o) {
  const u64 address = get<u64>(t, o[0]) + get<u64>(t, o[1]);
  T values[COUNT];
  for (int i = 0; i < COUNT; ++i) values[i] = get<T>(t, o[2 + i]);
  std::memcpy(place_of(t, SPACE, address, sizeof(values), true), values, sizeof(values));
}

// ---- numbers

constexpr u32 kCanonicalNan = 0x7FFFFFFFu;

float float_of(u32 bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// "Floating-point instructions that produce a NaN produce the canonical one" for .f32; .f64 keeps what it has.
float result(float value) { return std::isnan(value) ? float_of(kCanonicalNan) : value; }
double result(double value) { return value; }

// The smaller one, with -0.0 below +0.0; of a NaN and a number it is the number, or with .NaN the NaN.
template <class F>
F smaller(F a, F b, bool nan_wins) {
  if (std::isnan(a) || std::isnan(b)) {
    if (nan_wins || (std::isnan(a) && std::isnan(b))) return std::numeric_limits<F>::quiet_NaN();
    return std::isnan(a) ? b : a;
  }
  if (a == b) return std::signbit(a) ? a : b;
  return a < b ? a : b;
}

template <class F>
F larger(F a, F b, bool nan_wins) {
  return -smaller<F>(-a, -b, nan_wins);
}

float half_value(u16 bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  const float sign = bits & 0x8000 ? -1.0f : 1.0f;
  if (exponent == 31) return mantissa != 0 ? float_of(kCanonicalNan) : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(mantissa), -24);
  return sign * std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25);
}

// Rounded to nearest even in units of the last place, found by scaling: exact in double.
u16 half_bits(float value) {
  if (std::isnan(value)) return 0x7FFF;
  const u16 sign = std::signbit(value) ? 0x8000 : 0;
  const double size = std::fabs(static_cast<double>(value));
  if (size >= 65520.0) return sign | 0x7C00;
  const int exponent = size < 6.103515625e-05 ? -14 : std::ilogb(size);
  const u32 units = static_cast<u32>(std::nearbyint(std::ldexp(size, 10 - exponent)));
  return static_cast<u16>(sign + (exponent == -14 && units < 1024 ? units : (exponent + 15) * 1024 + units - 1024));
}

float bfloat_value(u16 bits) { return float_of(static_cast<u32>(bits) << 16); }

u16 bfloat_bits(float value) {
  if (std::isnan(value)) return 0x7FFF;
  u32 bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const u32 kept = bits >> 16, rest = bits & 0xFFFFu;
  return static_cast<u16>(kept + (rest > 0x8000u || (rest == 0x8000u && kept % 2 == 1) ? 1 : 0));
}

using Widen = float (*)(u16);
using Narrow = u16 (*)(float);

template <class Function>
u32 pairwise(u32 a, u32 b, Widen widen, Narrow narrow, Function function) {
  const u16 low = narrow(function(widen(static_cast<u16>(a)), widen(static_cast<u16>(b))));
  const u16 high = narrow(function(widen(static_cast<u16>(a >> 16)), widen(static_cast<u16>(b >> 16))));
  return low | static_cast<u32>(high) << 16;
}

// Rounded to an integer, then clamped to the range of the destination; NaN is zero.
template <class T>
T integer_of(double rounded) {
  if (std::isnan(rounded)) return 0;
  if (rounded <= static_cast<double>(std::numeric_limits<T>::min())) return std::numeric_limits<T>::min();
  if (rounded >= static_cast<double>(std::numeric_limits<T>::max())) return std::numeric_limits<T>::max();
  return static_cast<T>(rounded);
}

// ---- the table of instructions

std::map<std::string, Operation>& table() {
  static std::map<std::string, Operation> operations;
  return operations;
}

void add(const std::string& opcode, int operands, Handler handler, Kind kind = Kind::kPlain) {
  table()[opcode] = Operation{kind, operands, handler};
}

template <class T>
void add_loads_and_stores(const std::string& type) {
  const auto both = [&](const std::string& space, auto tag) {
    constexpr Space kSpace = decltype(tag)::value;
    add("ld" + space + type, 3, load<T, kSpace, 1>);
    add("ld" + space + ".v2" + type, 4, load<T, kSpace, 2>);
    add("ld" + space + ".v4" + type, 6, load<T, kSpace, 4>);
    add("st" + space + type, 3, store<T, kSpace, 1>);
    add("st" + space + ".v2" + type, 4, store<T, kSpace, 2>);
    add("st" + space + ".v4" + type, 6, store<T, kSpace, 4>);
  };
  both("", std::integral_constant<Space, Space::kGeneric>{});
  both(".global", std::integral_constant<Space, Space::kGlobal>{});
  both(".shared", std::integral_constant<Space, Space::kShared>{});
  both(".local", std::integral_constant<Space, Space::kLocal>{});
  add("ld.global.nc" + type, 3, load<T, Space::kGlobal, 1>);
  add("ld.param" + type, 3, [](Thread& t, const int* o) {  // number of the parameter, offset
    if (get<u64>(t, o[2]) != 0) fail("a parameter is read with an offset");
    T value;
    std::memcpy(&value, t.arguments + get<u64>(t, o[1]), sizeof(T));
    put<T>(t, o[0], value);
  });
}

template <class T, class Function>
void put_combined(Thread& t, const int* o, Function function) {
  put<T>(t, o[0], static_cast<T>(function(get<T>(t, o[1]), get<T>(t, o[2]))));
}

template <class T>
void add_bits(const std::string& type) {
  add("mov" + type, 2, [](Thread& t, const int* o) { put<T>(t, o[0], get<T>(t, o[1])); });
  add("and" + type, 3, [](Thread& t, const int* o) { put_combined<T>(t, o, [](T a, T b) { return a & b; }); });
  add("or" + type, 3, [](Thread& t, const int* o) { put_combined<T>(t, o, [](T a, T b) { return a | b; }); });
  add("xor" + type, 3, [](Thread& t, const int* o) { put_combined<T>(t, o, [](T a, T b) { return a ^ b; }); });
  add("not" + type, 2, [](Thread& t, const int* o) { put<T>(t, o[0], static_cast<T>(~get<T>(t, o[1]))); });
  add("shl" + type, 3, [](Thread& t, const int* o) {
    const u32 shift = get<u32>(t, o[2]);
    put<T>(t, o[0], shift >= 8 * sizeof(T) ? T{0} : static_cast<T>(get<T>(t, o[1]) << shift));
  });
}

template <class T>
void add_selection(const std::string& type) {
  add("selp" + type, 4,
      [](Thread& t, const int* o) { put<T>(t, o[0], (raw(t, o[3]) & 1) != 0 ? get<T>(t, o[1]) : get<T>(t, o[2])); });
}

// Shifts right by more than the width fill with the sign, or with zeros.
template <class T>
void shift_right(Thread& t, const int* o) {
  constexpr u32 kWidth = 8 * sizeof(T);
  const u32 shift = get<u32>(t, o[2]);
  const T value = get<T>(t, o[1]);
  if (shift >= kWidth)
    put<T>(t, o[0], std::is_signed_v<T> && value < 0 ? static_cast<T>(-1) : T{0});
  else
    put<T>(t, o[0], static_cast<T>(value >> shift));
}

template <class T>
void add_integers(const std::string& type) {
  using U = std::make_unsigned_t<T>;
  add("mov" + type, 2, [](Thread& t, const int* o) { put<T>(t, o[0], get<T>(t, o[1])); });
  add("add" + type, 3, [](Thread& t, const int* o) { put_combined<U>(t, o, [](U a, U b) { return u64{a} + b; }); });
  add("sub" + type, 3, [](Thread& t, const int* o) { put_combined<U>(t, o, [](U a, U b) { return u64{a} - b; }); });
  add("mul.lo" + type, 3, [](Thread& t, const int* o) { put_combined<U>(t, o, [](U a, U b) { return u64{a} * b; }); });
  add("mad.lo" + type, 4, [](Thread& t, const int* o) {
    put<U>(t, o[0], static_cast<U>(u64{get<U>(t, o[1])} * get<U>(t, o[2]) + get<U>(t, o[3])));
  });
  add("div" + type, 3, [](Thread& t, const int* o) {
    if (get<T>(t, o[2]) == 0) fail("division by zero");
    put_combined<T>(t, o, [](T a, T b) { return a / b; });
  });
  add("rem" + type, 3, [](Thread& t, const int* o) {
    if (get<T>(t, o[2]) == 0) fail("division by zero");
    put_combined<T>(t, o, [](T a, T b) { return a % b; });
  });
  add("min" + type, 3, [](Thread& t, const int* o) { put_combined<T>(t, o, [](T a, T b) { return a < b ? a : b; }); });
  add("max" + type, 3, [](Thread& t, const int* o) { put_combined<T>(t, o, [](T a, T b) { return a > b ? a : b; }); });
  add("neg" + type, 2, [](Thread& t, const int* o) { put<U>(t, o[0], static_cast<U>(u64{0} - get<U>(t, o[1]))); });
  add("abs" + type, 2, [](Thread& t, const int* o) {
    const T value = get<T>(t, o[1]);
    put<U>(t, o[0], static_cast<U>(value < 0 ? u64{0} - static_cast<U>(value) : static_cast<U>(value)));
  });
  add("shr" + type, 3, shift_right<T>);
}

// T is half as wide as WIDE.
template <class T, class WIDE>
void add_wide_products(const std::string& type) {
  add("mul.wide" + type, 3, [](Thread& t, const int* o) {
    put<WIDE>(t, o[0], static_cast<WIDE>(get<T>(t, o[1])) * static_cast<WIDE>(get<T>(t, o[2])));
  });
  add("mul.hi" + type, 3, [](Thread& t, const int* o) {
    const WIDE product = static_cast<WIDE>(get<T>(t, o[1])) * static_cast<WIDE>(get<T>(t, o[2]));
    put<T>(t, o[0], static_cast<T>(product >> (8 * sizeof(T))));
  });
  add("mad.wide" + type, 4, [](Thread& t, const int* o) {
    const WIDE product = static_cast<WIDE>(get<T>(t, o[1])) * static_cast<WIDE>(get<T>(t, o[2]));
    put<u64>(t, o[0], static_cast<std::make_unsigned_t<WIDE>>(static_cast<u64>(product) + get<u64>(t, o[3])));
  });
}

// Registers opcode<comparison><type> and the forms that combine the outcome with another predicate.
template <class T, bool (*COMPARE)(T, T)>
void add_comparison(const std::string& name, const std::string& type) {
  add("setp." + name + type, 3,
      [](Thread& t, const int* o) { put<u8>(t, o[0], COMPARE(get<T>(t, o[1]), get<T>(t, o[2]))); });
  add("setp." + name + ".and" + type, 4, [](Thread& t, const int* o) {
    put<u8>(t, o[0], COMPARE(get<T>(t, o[1]), get<T>(t, o[2])) && (raw(t, o[3]) & 1) != 0);
  });
  add("setp." + name + ".or" + type, 4, [](Thread& t, const int* o) {
    put<u8>(t, o[0], COMPARE(get<T>(t, o[1]), get<T>(t, o[2])) || (raw(t, o[3]) & 1) != 0);
  });
}

template <class T>
bool equal(T a, T b) {
  return a == b;
}
template <class T>
bool less(T a, T b) {
  return a < b;
}
template <class T>
bool less_or_equal(T a, T b) {
  return a <= b;
}
template <class T>
bool greater(T a, T b) {
  return a > b;
}
template <class T>
bool greater_or_equal(T a, T b) {
  return a >= b;
}
template <class T>
bool unordered(T a, T b) {
  return a != a || b != b;
}
template <class T>
bool is_number(T a, T b) {
  return !unordered(a, b);
}
template <class T>
bool not_equal(T a, T b) {
  return is_number(a, b) && a != b;
}  // false where one is NaN
template <class T, bool (*COMPARE)(T, T)>
bool or_unordered(T a, T b) {
  return unordered(a, b) || COMPARE(a, b);
}

template <class T>
void add_comparisons(const std::string& type) {
  add_comparison<T, equal<T>>("eq", type);
  add_comparison<T, not_equal<T>>("ne", type);
  add_comparison<T, less<T>>("lt", type);
  add_comparison<T, less_or_equal<T>>("le", type);
  add_comparison<T, greater<T>>("gt", type);
  add_comparison<T, greater_or_equal<T>>("ge", type);
}

template <class F>
void add_floats(const std::string& type) {
  add("mov" + type, 2, [](Thread& t, const int* o) { put<F>(t, o[0], get<F>(t, o[1])); });
  add("add.rn" + type, 3,
      [](Thread& t, const int* o) { put_combined<F>(t, o, [](F a, F b) { return result(a + b); }); });
  add("sub.rn" + type, 3,
      [](Thread& t, const int* o) { put_combined<F>(t, o, [](F a, F b) { return result(a - b); }); });
  add("mul.rn" + type, 3,
      [](Thread& t, const int* o) { put_combined<F>(t, o, [](F a, F b) { return result(a * b); }); });
  add("div.rn" + type, 3,
      [](Thread& t, const int* o) { put_combined<F>(t, o, [](F a, F b) { return result(a / b); }); });
  add("fma.rn" + type, 4, [](Thread& t, const int* o) {
    put<F>(t, o[0], result(std::fma(get<F>(t, o[1]), get<F>(t, o[2]), get<F>(t, o[3]))));
  });
  add("min" + type, 3,
      [](Thread& t, const int* o) { put_combined<F>(t, o, [](F a, F b) { return result(smaller(a, b, false)); }); });
  add("max" + type, 3,
      [](Thread& t, const int* o) { put_combined<F>(t, o, [](F a, F b) { return result(larger(a, b, false)); }); });
  add("neg" + type, 2, [](Thread& t, const int* o) { put<F>(t, o[0], -get<F>(t, o[1])); });
  add("abs" + type, 2, [](Thread& t, const int* o) { put<F>(t, o[0], std::fabs(get<F>(t, o[1]))); });
  add_comparisons<F>(type);
  add_comparison<F, or_unordered<F, equal<F>>>("equ", type);
  add_comparison<F, or_unordered<F, not_equal<F>>>("neu", type);
  add_comparison<F, or_unordered<F, less<F>>>("ltu", type);
  add_comparison<F, or_unordered<F, less_or_equal<F>>>("leu", type);
  add_comparison<F, or_unordered<F, greater<F>>>("gtu", type);
  add_comparison<F, or_unordered<F, greater_or_equal<F>>>("geu", type);
  add_comparison<F, is_number<F>>("num", type);
  add_comparison<F, unordered<F>>("nan", type);
}

void add_small_floats(const std::string& type, Handler minimum, Handler maximum) {
  add("min.NaN" + type, 3, minimum);
  add("max.NaN" + type, 3, maximum);
}

template <Widen WIDEN, Narrow NARROW>
void smaller_pair(Thread& t, const int* o) {
  put<u32>(t, o[0], pairwise(get<u32>(t, o[1]), get<u32>(t, o[2]), WIDEN, NARROW, [](float a, float b) {
             return smaller(a, b, true);
           }));
}

template <Widen WIDEN, Narrow NARROW>
void larger_pair(Thread& t, const int* o) {
  put<u32>(t, o[0], pairwise(get<u32>(t, o[1]), get<u32>(t, o[2]), WIDEN, NARROW, [](float a, float b) {
             return larger(a, b, true);
           }));
}

template <class TO, class FROM>
void add_conversion(const std::string& to, const std::string& from) {
  add("cvt" + to + from, 2, [](Thread& t, const int* o) { put<TO>(t, o[0], static_cast<TO>(get<FROM>(t, o[1]))); });
}

template <class FROM>
void add_conversions_from(const std::string& from) {
  add_conversion<u8, FROM>(".u8", from);
  add_conversion<u16, FROM>(".u16", from);
  add_conversion<u32, FROM>(".u32", from);
  add_conversion<u64, FROM>(".u64", from);
  add_conversion<i8, FROM>(".s8", from);
  add_conversion<i16, FROM>(".s16", from);
  add_conversion<i32, FROM>(".s32", from);
  add_conversion<i64, FROM>(".s64", from);
  add_conversion<float, FROM>(".rn.f32", from);
  add_conversion<double, FROM>(".rn.f64", from);
}

template <class TO>
void add_conversions_of_floats(const std::string& to) {
  add("cvt.rni" + to + ".f32", 2, [](Thread& t, const int* o) {
    put<TO>(t, o[0], integer_of<TO>(std::nearbyint(static_cast<double>(get<float>(t, o[1])))));
  });
  add("cvt.rzi" + to + ".f32", 2, [](Thread& t, const int* o) {
    put<TO>(t, o[0], integer_of<TO>(std::trunc(static_cast<double>(get<float>(t, o[1])))));
  });
}

template <Narrow NARROW>
void narrow(Thread& t, const int* o) {
  put<u16>(t, o[0], NARROW(get<float>(t, o[1])));
}

// The first source is the upper half.
template <Narrow NARROW>
void narrow_pair(Thread& t, const int* o) {
  put<u32>(t, o[0], static_cast<u32>(NARROW(get<float>(t, o[1]))) << 16 | NARROW(get<float>(t, o[2])));
}

template <Widen WIDEN>
void widen(Thread& t, const int* o) {
  put<float>(t, o[0], WIDEN(get<u16>(t, o[1])));
}

// Packing and unpacking by mov with a vector on one side; program.py writes the number of parts into the opcode.
template <class WHOLE, class PART, int COUNT>
void add_vector_moves(const std::string& type) {
  const std::string count = std::to_string(COUNT);
  add("mov" + type + ".split" + count, 1 + COUNT, [](Thread& t, const int* o) {
    const WHOLE whole = get<WHOLE>(t, o[COUNT]);
    for (int i = 0; i < COUNT; ++i) put<PART>(t, o[i], static_cast<PART>(whole >> (8 * sizeof(PART) * i)));
  });
  add("mov" + type + ".join" + count, 1 + COUNT, [](Thread& t, const int* o) {
    u64 whole = 0;
    for (int i = 0; i < COUNT; ++i) whole |= static_cast<u64>(get<PART>(t, o[1 + i])) << (8 * sizeof(PART) * i);
    put<WHOLE>(t, o[0], static_cast<WHOLE>(whole));
  });
}

template <bool LEFT, bool WRAP>
void funnel_shift(Thread& t, const int* o) {
  const u32 asked = get<u32>(t, o[3]);
  const u32 shift = WRAP ? asked % 32u : (asked < 32u ? asked : 32u);
  const u64 both = static_cast<u64>(get<u32>(t, o[2])) << 32 | get<u32>(t, o[1]);
  put<u32>(t, o[0], static_cast<u32>(LEFT ? (both << shift) >> 32 : both >> shift));
}

// Default mode: four bits select each byte, of which the highest replicates the sign of the byte.
void permute(Thread& t, const int* o) {
  const u64 both = static_cast<u64>(get<u32>(t, o[2])) << 32 | get<u32>(t, o[1]);
  const u32 selector = get<u32>(t, o[3]);
  u32 bytes = 0;
  for (int i = 0; i < 4; ++i) {
    const u32 choice = selector >> (4 * i) & 15u;
    const u8 byte = static_cast<u8>(both >> (8 * (choice & 7u)));
    const u8 chosen = (choice & 8u) == 0 ? byte : ((byte & 0x80u) != 0 ? 0xFF : 0);
    bytes |= static_cast<u32>(chosen) << (8 * i);
  }
  put<u32>(t, o[0], bytes);
}

// Field `a` of the length in `d`, inserted into `b` at the position in `c`.
template <class T>
void insert_field(Thread& t, const int* o) {
  const u32 position = get<u32>(t, o[3]) & 0xFFu, length = get<u32>(t, o[4]) & 0xFFu;
  const T field = get<T>(t, o[1]);
  T value = get<T>(t, o[2]);
  for (u32 i = 0; i < length && position + i < 8 * sizeof(T); ++i) {
    const T bit = T{1} << (position + i);
    value = static_cast<T>((value & ~bit) | ((field >> i & 1) != 0 ? bit : T{0}));
  }
  put<T>(t, o[0], value);
}

// Beyond the highest bit the sign of the field fills up, which is zero for unsigned types.
template <class T>
void extract_field(Thread& t, const int* o) {
  using U = std::make_unsigned_t<T>;
  constexpr u32 kTop = 8 * sizeof(T) - 1;
  const u32 position = get<u32>(t, o[2]) & 0xFFu, length = get<u32>(t, o[3]) & 0xFFu;
  const U value = get<U>(t, o[1]);
  const u32 sign_at = position + length - 1 < kTop ? position + length - 1 : kTop;
  const bool sign = std::is_signed_v<T> && length != 0 && (value >> sign_at & 1) != 0;
  U field = 0;
  for (u32 i = 0; i <= kTop; ++i) {
    const bool bit = i < length && position + i <= kTop ? (value >> (position + i) & 1) != 0 : sign;
    if (bit) field |= U{1} << i;
  }
  put<U>(t, o[0], field);
}

// immLut is evaluated on the bits of 0xF0, 0xCC and 0xAA.
void logic_of_three(Thread& t, const int* o) {
  const u32 a = get<u32>(t, o[1]), b = get<u32>(t, o[2]), c = get<u32>(t, o[3]), outcomes = get<u32>(t, o[4]);
  u32 value = 0;
  for (int i = 0; i < 32; ++i) {
    const u32 row = (a >> i & 1u) << 2 | (b >> i & 1u) << 1 | (c >> i & 1u);
    value |= (outcomes >> row & 1u) << i;
  }
  put<u32>(t, o[0], value);
}

void sum_of_byte_distances(Thread& t, const int* o) {
  const u32 a = get<u32>(t, o[1]), b = get<u32>(t, o[2]);
  u32 sum = get<u32>(t, o[3]);
  for (int shift = 0; shift < 32; shift += 8) {
    const int left = static_cast<int>(a >> shift & 0xFFu), right = static_cast<int>(b >> shift & 0xFFu);
    sum += static_cast<u32>(left < right ? right - left : left - right);
  }
  put<u32>(t, o[0], sum);
}

void add_integer_instructions() {
  add_integers<u16>(".u16");
  add_integers<u32>(".u32");
  add_integers<u64>(".u64");
  add_integers<i16>(".s16");
  add_integers<i32>(".s32");
  add_integers<i64>(".s64");
  add_wide_products<u16, u32>(".u16");
  add_wide_products<i16, i32>(".s16");
  add_wide_products<u32, u64>(".u32");
  add_wide_products<i32, i64>(".s32");
  add_bits<u16>(".b16");
  add_bits<u32>(".b32");
  add_bits<u64>(".b64");
  add_comparisons<u16>(".u16");
  add_comparisons<u32>(".u32");
  add_comparisons<u64>(".u64");
  add_comparisons<i16>(".s16");
  add_comparisons<i32>(".s32");
  add_comparisons<i64>(".s64");
  add_comparisons<u16>(".b16");
  add_comparisons<u32>(".b32");
  add_comparisons<u64>(".b64");
  add("shf.l.wrap.b32", 4, funnel_shift<true, true>);
  add("shf.r.wrap.b32", 4, funnel_shift<false, true>);
  add("shf.l.clamp.b32", 4, funnel_shift<true, false>);
  add("shf.r.clamp.b32", 4, funnel_shift<false, false>);
  add("prmt.b32", 4, permute);
  add("bfi.b32", 5, insert_field<u32>);
  add("bfi.b64", 5, insert_field<u64>);
  add("bfe.u32", 4, extract_field<u32>);
  add("bfe.s32", 4, extract_field<i32>);
  add("bfe.u64", 4, extract_field<u64>);
  add("lop3.b32", 5, logic_of_three);
  add("vabsdiff4.u32.u32.u32.add", 4, sum_of_byte_distances);
  add("popc.b32", 2, [](Thread& t, const int* o) { put<u32>(t, o[0], __builtin_popcount(get<u32>(t, o[1]))); });
  add("clz.b32", 2, [](Thread& t, const int* o) {
    const u32 value = get<u32>(t, o[1]);
    put<u32>(t, o[0], value == 0 ? 32 : __builtin_clz(value));
  });
}

void add_predicates() {
  add("mov.pred", 2, [](Thread& t, const int* o) { put<u8>(t, o[0], raw(t, o[1]) & 1); });
  add("not.pred", 2, [](Thread& t, const int* o) { put<u8>(t, o[0], (raw(t, o[1]) & 1) ^ 1); });
  add("and.pred", 3, [](Thread& t, const int* o) { put<u8>(t, o[0], raw(t, o[1]) & raw(t, o[2]) & 1); });
  add("or.pred", 3, [](Thread& t, const int* o) { put<u8>(t, o[0], (raw(t, o[1]) | raw(t, o[2])) & 1); });
  add("xor.pred", 3, [](Thread& t, const int* o) { put<u8>(t, o[0], (raw(t, o[1]) ^ raw(t, o[2])) & 1); });
}

void add_float_instructions() {
  add_floats<float>(".f32");
  add_floats<double>(".f64");
  add("min.NaN.f32", 3, [](Thread& t, const int* o) {
    put_combined<float>(t, o, [](float a, float b) { return result(smaller(a, b, true)); });
  });
  add("max.NaN.f32", 3, [](Thread& t, const int* o) {
    put_combined<float>(t, o, [](float a, float b) { return result(larger(a, b, true)); });
  });
  add_small_floats(".bf16x2", smaller_pair<bfloat_value, bfloat_bits>, larger_pair<bfloat_value, bfloat_bits>);
  add_small_floats(".f16x2", smaller_pair<half_value, half_bits>, larger_pair<half_value, half_bits>);
  add("cvt.rn.f16.f32", 2, narrow<half_bits>);
  add("cvt.rn.bf16.f32", 2, narrow<bfloat_bits>);
  add("cvt.rn.f16x2.f32", 3, narrow_pair<half_bits>);
  add("cvt.rn.bf16x2.f32", 3, narrow_pair<bfloat_bits>);
  add("cvt.f32.f16", 2, widen<half_value>);
  add("cvt.f32.bf16", 2, widen<bfloat_value>);
  add("cvt.f64.f32", 2, [](Thread& t, const int* o) { put<double>(t, o[0], get<float>(t, o[1])); });
  add("cvt.rn.f32.f64", 2,
      [](Thread& t, const int* o) { put<float>(t, o[0], result(static_cast<float>(get<double>(t, o[1])))); });
}

void add_conversions() {
  add_conversions_from<u8>(".u8");
  add_conversions_from<u16>(".u16");
  add_conversions_from<u32>(".u32");
  add_conversions_from<u64>(".u64");
  add_conversions_from<i8>(".s8");
  add_conversions_from<i16>(".s16");
  add_conversions_from<i32>(".s32");
  add_conversions_from<i64>(".s64");
  add_conversions_of_floats<i32>(".s32");
  add_conversions_of_floats<u32>(".u32");
}

void add_memory_and_moves() {
  add_loads_and_stores<u8>(".u8");
  add_loads_and_stores<u16>(".u16");
  add_loads_and_stores<u32>(".u32");
  add_loads_and_stores<u64>(".u64");
  add_loads_and_stores<u8>(".b8");
  add_loads_and_stores<u16>(".b16");
  add_loads_and_stores<u32>(".b32");
  add_loads_and_stores<u64>(".b64");
  add_loads_and_stores<i8>(".s8");
  add_loads_and_stores<i16>(".s16");
  add_loads_and_stores<i32>(".s32");
  add_loads_and_stores<i64>(".s64");
  add_loads_and_stores<float>(".f32");
  add_loads_and_stores<double>(".f64");
  for (const char* type : {".b16", ".u16", ".s16"}) add_selection<u16>(type);
  for (const char* type : {".b32", ".u32", ".s32", ".f32"}) add_selection<u32>(type);
  for (const char* type : {".b64", ".u64", ".s64", ".f64"}) add_selection<u64>(type);
  add_vector_moves<u32, u16, 2>(".b32");
  add_vector_moves<u32, u8, 4>(".b32");
  add_vector_moves<u64, u32, 2>(".b64");
  add_vector_moves<u64, u16, 4>(".b64");
}

// Generic addresses are those of this machine.
void add_address_spaces() {
  const auto same = [](Thread& t, const int* o) { put<u64>(t, o[0], get<u64>(t, o[1])); };
  add("cvta.to.global.u64", 2, same);
  add("cvta.global.u64", 2, same);
  add("cvta.shared.u64", 2,
      [](Thread& t, const int* o) { put<u64>(t, o[0], get<u64>(t, o[1]) + reinterpret_cast<u64>(machine.shared)); });
  add("cvta.to.shared.u64", 2,
      [](Thread& t, const int* o) { put<u64>(t, o[0], get<u64>(t, o[1]) - reinterpret_cast<u64>(machine.shared)); });
  add("cvta.local.u64", 2,
      [](Thread& t, const int* o) { put<u64>(t, o[0], get<u64>(t, o[1]) + reinterpret_cast<u64>(t.local)); });
  add("cvta.to.local.u64", 2,
      [](Thread& t, const int* o) { put<u64>(t, o[0], get<u64>(t, o[1]) - reinterpret_cast<u64>(t.local)); });
}

void add_control() {
  add("nop", 0, [](Thread&, const int*) {});
  for (const char* opcode : {"bra", "bra.uni"}) add(opcode, 1, nullptr, Kind::kBranch);
  for (const char* opcode : {"ret", "exit"}) add(opcode, 0, nullptr, Kind::kExit);
  add("bar.sync", 1, nullptr, Kind::kBlockBarrier);      // the number of the barrier
  add("bar.warp.sync", 1, nullptr, Kind::kWarpBarrier);  // lanes
  for (const char* mode : {"bfly", "idx", "up", "down"}) {
    add(std::string("shfl.sync.") + mode + ".b32", 6, nullptr, Kind::kShuffle);  // d, p, a, b, c, lanes
  }
  for (const char* mode : {"any.pred", "all.pred", "ballot.b32"}) {
    add(std::string("vote.sync.") + mode, 3, nullptr, Kind::kVote);  // d, a, lanes
  }
}

void fill_table() {
  if (!table().empty()) return;
  add_integer_instructions();
  add_predicates();
  add_float_instructions();
  add_conversions();
  add_memory_and_moves();
  add_address_spaces();
  add_control();
}

// ---- programs

struct Program {
  std::vector<Instruction> instructions;
  std::vector<u64> constants, executed;
  int registers = 0;
  u64 shared_bytes = 0, local_bytes = 0;
  int thread = -1, block = -1, blocks = -1, threads = -1, lane = -1;  // registers that hold these
};

void read_header(Program& program, const std::string& word, std::istringstream& line) {
  u64 constant;
  if (word == ".registers")
    line >> program.registers;
  else if (word == ".shared")
    line >> program.shared_bytes;
  else if (word == ".local")
    line >> program.local_bytes;
  else if (word == ".constants")
    while (line >> constant) program.constants.push_back(constant);
  else if (word == ".specials")
    line >> program.thread >> program.block >> program.blocks >> program.threads >> program.lane;
  else
    fail("unknown directive " + word);
}

// "opcode guard operands": the guard is "-", "p4" or "!p4".
Instruction instruction_of(const std::string& opcode, std::istringstream& line) {
  const auto found = table().find(opcode);
  if (found == table().end()) fail("unknown instruction " + opcode);
  Instruction instruction{&found->second, opcode, -1, false, {}};
  std::string guard;
  line >> guard;
  instruction.negated = guard[0] == '!';
  if (guard != "-") instruction.guard = std::stoi(guard.substr(instruction.negated ? 2 : 1));
  int count = 0;
  while (count < 12 && line >> instruction.operands[count]) ++count;
  if (count != found->second.operands) fail(opcode + " has " + std::to_string(count) + " operands");
  return instruction;
}

Program* parsed(const char* text) {
  fill_table();
  auto program = std::make_unique<Program>();
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string first;
    words >> first;
    if (first[0] == '.')
      read_header(*program, first, words);
    else
      program->instructions.push_back(instruction_of(first, words));
  }
  if (program->shared_bytes > kSharedBytes) fail("too much shared memory");
  program->executed.assign(program->instructions.size(), 0);
  return program.release();
}

// ---- running

class Block {
 public:
  Block(Program& program, const i64* arguments) : program_(program), threads_(machine.threads) {
    registers_.resize(machine.threads * static_cast<u64>(program.registers));
    local_.resize(machine.threads * (program.local_bytes + 16));
    for (Thread& t : threads_) {
      t.constants = program.constants.data();
      t.arguments = arguments;
    }
  }

  void run() {
    reset();
    const u32 warps = machine.threads / kLanes;
    for (;;) {
      // The other way round in every other block: not needed to find races, but wrong bytes show in one of them.
      for (u32 i = 0; i < warps; ++i) run_warp(machine.block % 2 == 0 ? i : warps - 1 - i);
      if (all_ended()) return;
      pass_block_barrier();
    }
  }

 private:
  Program& program_;
  std::vector<Thread> threads_;
  std::vector<u64> registers_;
  std::vector<u8> local_;

  void reset() {
    std::memset(machine.shared, kGarbage, program_.shared_bytes);
    for (u64 at = 0; at < program_.shared_bytes; ++at) cell_at(reinterpret_cast<u64>(machine.shared) + at).forget();
    std::memset(registers_.data(), kGarbage, registers_.size() * sizeof(u64));
    std::memset(local_.data(), kGarbage, local_.size());
    for (u32 number = 0; number < machine.threads; ++number) {
      Thread& t = threads_[number];
      t.registers = registers_.data() + static_cast<u64>(number) * program_.registers;
      t.local = local_.data() + number * (program_.local_bytes + 16);
      t.local += (16 - reinterpret_cast<u64>(t.local) % 16) % 16;
      t.number = number;
      t.pc = t.block_phase = t.warp_phase = 0;
      t.waits = t.ended = false;
      t.registers[program_.thread] = number;
      t.registers[program_.block] = machine.block;
      t.registers[program_.blocks] = machine.blocks;
      t.registers[program_.threads] = machine.threads;
      t.registers[program_.lane] = number % kLanes;
    }
  }

  const Instruction& at(const Thread& t) const { return program_.instructions[t.pc]; }

  // Until it waits or ends.
  void run_thread(Thread& t) {
    t.waits = false;
    for (;;) {
      if (t.pc >= program_.instructions.size()) fail("beyond the end of the kernel");
      const Instruction& instruction = at(t);
      ++program_.executed[t.pc];
      if (instruction.guard >= 0 && (t.registers[instruction.guard] & 1) == (instruction.negated ? 1u : 0u)) {
        ++t.pc;
        continue;
      }
      switch (instruction.operation->kind) {
        case Kind::kPlain:
          instruction.operation->run(t, instruction.operands);
          ++t.pc;
          break;
        case Kind::kBranch:
          t.pc = get<u32>(t, instruction.operands[0]);
          break;
        case Kind::kExit:
          t.ended = true;
          return;
        default:
          t.waits = true;
          return;
      }
    }
  }

  // Until all its threads have ended or wait for the other warps.
  void run_warp(u32 warp) {
    Thread* lanes = &threads_[warp * kLanes];
    for (u32 lane = 0; lane < kLanes; ++lane) {
      if (!lanes[lane].ended) run_thread(lanes[lane]);
    }
    while (meet(lanes)) {
    }
  }

  // One meeting of lanes, after which they run on; false where none is due in this warp.
  bool meet(Thread* lanes) {
    bool waits = false;
    for (u32 lane = 0; lane < kLanes; ++lane) {
      Thread& t = lanes[lane];
      if (!t.waits || at(t).operation->kind == Kind::kBlockBarrier) continue;
      waits = true;
      if (all_arrived(lanes, t)) {
        exchange(lanes, at(t), lanes_of(t));
        return true;
      }
    }
    if (waits) fail("lanes wait for others that do not come, at " + at(first_waiting(lanes)).opcode);
    return false;
  }

  static Thread& first_waiting(Thread* lanes) {
    u32 lane = 0;
    while (!lanes[lane].waits) ++lane;
    return lanes[lane];
  }

  u32 lanes_of(const Thread& t) const {
    const Instruction& instruction = at(t);
    return get<u32>(t, instruction.operands[instruction.operation->operands - 1]);
  }

  // "Waits until all non-exited threads of membermask have executed the same instruction with the same membermask".
  bool all_arrived(const Thread* lanes, const Thread& t) const {
    const u32 wanted = lanes_of(t);
    if ((wanted >> (t.number % kLanes) & 1u) == 0) fail(at(t).opcode + " by a lane that is not in its mask");
    for (u32 lane = 0; lane < kLanes; ++lane) {
      const Thread& other = lanes[lane];
      if ((wanted >> lane & 1u) == 0 || other.ended) continue;
      if (!other.waits || at(other).opcode != at(t).opcode || lanes_of(other) != wanted) return false;
    }
    return true;
  }

  void exchange(Thread* lanes, const Instruction& instruction, u32 wanted) {
    if (instruction.operation->kind == Kind::kShuffle) shuffle(lanes, instruction.opcode, wanted);
    if (instruction.operation->kind == Kind::kVote) vote(lanes, instruction.opcode, wanted);
    const bool barrier = instruction.operation->kind == Kind::kWarpBarrier;
    for (u32 lane = 0; lane < kLanes; ++lane) {
      Thread& t = lanes[lane];
      if ((wanted >> lane & 1u) == 0) {
        if (barrier && !t.ended) fail("bar.warp.sync of a part of a warp");
        continue;
      }
      if (t.ended) continue;
      if (barrier) ++t.warp_phase;
      ++t.pc;
    }
    for (u32 lane = 0; lane < kLanes; ++lane) {
      if ((wanted >> lane & 1u) != 0 && !lanes[lane].ended) run_thread(lanes[lane]);
    }
  }

  void shuffle(Thread* lanes, const std::string& opcode, u32 wanted) {
    u32 values[kLanes], sources[kLanes];
    bool inside[kLanes];
    for (u32 lane = 0; lane < kLanes; ++lane) {
      const Thread& t = lanes[lane];
      if ((wanted >> lane & 1u) == 0 || t.ended) continue;
      const int* o = at(t).operands;
      values[lane] = get<u32>(t, o[2]);
      const u32 b = get<u32>(t, o[3]) & 31u, clamp = get<u32>(t, o[4]) & 31u, segment = get<u32>(t, o[4]) >> 8 & 31u;
      const u32 highest = (lane & segment) | (clamp & ~segment), lowest = lane & segment;
      int source = static_cast<int>(lane ^ b);
      if (opcode.find(".up.") != std::string::npos) source = static_cast<int>(lane) - static_cast<int>(b);
      if (opcode.find(".down.") != std::string::npos) source = static_cast<int>(lane + b);
      if (opcode.find(".idx.") != std::string::npos) source = static_cast<int>(lowest | (b & ~segment));
      const bool up = opcode.find(".up.") != std::string::npos;
      inside[lane] = up ? source >= static_cast<int>(highest) : source <= static_cast<int>(highest);
      sources[lane] = inside[lane] ? static_cast<u32>(source) : lane;
    }
    for (u32 lane = 0; lane < kLanes; ++lane) {
      Thread& t = lanes[lane];
      if ((wanted >> lane & 1u) == 0 || t.ended) continue;
      const u32 source = sources[lane];
      if ((wanted >> source & 1u) == 0 || lanes[source].ended) fail("a shuffle reads from a lane that takes no part");
      put<u32>(t, at(t).operands[0], values[source]);
      put<u8>(t, at(t).operands[1], inside[lane]);
    }
  }

  void vote(Thread* lanes, const std::string& opcode, u32 wanted) {
    u32 yes = 0, present = 0;
    for (u32 lane = 0; lane < kLanes; ++lane) {
      if ((wanted >> lane & 1u) == 0 || lanes[lane].ended) continue;
      present |= 1u << lane;
      if ((raw(lanes[lane], at(lanes[lane]).operands[1]) & 1) != 0) yes |= 1u << lane;
    }
    u32 outcome = yes;
    if (opcode.find(".any.") != std::string::npos) outcome = yes != 0;
    if (opcode.find(".all.") != std::string::npos) outcome = yes == present;
    for (u32 lane = 0; lane < kLanes; ++lane) {
      if ((present >> lane & 1u) != 0) put<u32>(lanes[lane], at(lanes[lane]).operands[0], outcome);
    }
  }

  bool all_ended() const {
    for (const Thread& t : threads_) {
      if (!t.ended) return false;
    }
    return true;
  }

  void pass_block_barrier() {
    for (const Thread& t : threads_) {
      if (t.ended) fail("thread " + std::to_string(t.number) + " has ended and others wait at bar.sync");
      if (get<u32>(t, at(t).operands[0]) != 0) fail("a barrier with another number than 0");
      if (t.pc != threads_[t.number / kLanes * kLanes].pc) fail("the lanes of a warp wait at different bar.sync");
    }
    for (Thread& t : threads_) {
      ++t.block_phase;
      ++t.pc;
    }
  }
};

void run_grid(Program& program, const i64* arguments) {
  ++machine.launch;
  machine.shared_bytes = program.shared_bytes;
  Block block(program, arguments);
  for (machine.block = 0; machine.block < machine.blocks; ++machine.block) block.run();
}

}  // namespace

// ---- the interface; texts stay valid until the next call

extern "C" {

void* ptx_load(const char* text) {
  try {
    return parsed(text);
  } catch (const std::exception& error) {
    machine.error = error.what();
    return nullptr;
  }
}

void ptx_free(void* program) { delete static_cast<Program*>(program); }

// 0, or 1 with ptx_error() set.
int ptx_launch(void* program, i64 blocks, i64 threads, const i64* arguments) {
  machine.blocks = static_cast<u32>(blocks);
  machine.threads = static_cast<u32>(threads);
  try {
    if (threads % kLanes != 0) fail("a part of a warp");
    run_grid(*static_cast<Program*>(program), arguments);
  } catch (const std::exception& error) {
    machine.error = "block " + std::to_string(machine.block) + ": " + error.what();
    return 1;
  }
  return 0;
}

const char* ptx_error() { return machine.error.c_str(); }

// Races since the last call, and what the first of them were.
i64 ptx_races(const char** report) {
  static std::string text;
  text = machine.report;
  *report = text.c_str();
  const i64 races = machine.races;
  machine.races = 0;
  machine.report.clear();
  return races;
}

i64 ptx_accesses() { return machine.accesses; }

// How often each instruction was executed, of all threads.
const u64* ptx_executed(void* program) { return static_cast<Program*>(program)->executed.data(); }
}
