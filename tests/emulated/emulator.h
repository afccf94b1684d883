// Waves of lanes on a CPU: the vendors' intrinsics that common.cuh names, in terms of fibers. A lane is a fiber that runs
// until its next exchange, then the next lane does.
//
//     round k    lane 0  ----> shuffle     lane 1 ----> shuffle   ..   lane 31 ----> shuffle
//                                                                                          `- all at the same? then round k + 1
//
//     WAVE = 32     a warp of NVIDIA's
//     WAVE = 64     a wavefront of AMD's, whose halves may part: a ballot has zeros for the half that is elsewhere. In every
//                   other wave the upper half starts a round late, so that the halves never meet
//
// Waves run one after another, lanes of odd waves backwards, so that what one lane leaves in memory for another without an
// exchange between them differs from the truth in one of both. Lanes of a half that meet at different exchanges, or of which
// only some have returned, would hang or compute nonsense on a device: here they end the launch with a message.
//
// COUNTED: the instructions that a wave issues. The processor traps after each one; a lane's are counted by address between
// two exchanges, and the wave issues each address as often as the lane that needs it most. Halves do not part then:
//
//     if (..) 5 instructions        lanes that take either branch        --> 5 + 7
//     else 7 instructions
//     loop of 3 instructions        lanes that go round 2, 9, 4 times    --> 27

#include <cmath>
#define read read_of_unistd // names of kernels, too
#define write write_of_unistd
#include <csignal>
#undef read
#undef write
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>

namespace emulator {

const int HALF = 32, HALVES = WAVE / HALF, BLOCK_THREADS = 128;
const size_t STACK_BYTES = 256 << 10;
#define UNCOUNTED __attribute__((noinline, section("uncounted")))

struct Meeting { int line; char what; unsigned mask; };

struct Lane {
  ucontext_t context;
  Meeting meeting; // where it waits; line 0: it has returned
  unsigned given;
};

static Lane lanes[WAVE];
static unsigned board[WAVE]; // what was given at the last meeting of each half
static bool met[HALVES];     // in this round
static ucontext_t scheduler;
static int current, line;
static unsigned long long current_wave;
static void (*kernel)(...);
static const unsigned long long* arguments;

// -- instructions --------------------------------------------------------------------------------------------------------

#if defined(COUNTED)
extern "C" char __ehdr_start __attribute__((visibility("hidden"))); // where the library begins
extern "C" char __start_uncounted __attribute__((visibility("hidden"))), __stop_uncounted __attribute__((visibility("hidden")));
extern "C" { unsigned long long issued; }

const size_t SPAN = 1 << 20;
static unsigned mine[SPAN], most[SPAN]; // by address: of this lane, of all since the last exchange
static unsigned touched[SPAN];          // addresses of which `most` is not 0
static size_t addresses;

static void trapped(int, siginfo_t*, void* context) {
  size_t at = ((ucontext_t*)context)->uc_mcontext.gregs[REG_RIP], start = (size_t)&__ehdr_start;
  bool counts = at - start < SPAN && !(at >= (size_t)&__start_uncounted && at < (size_t)&__stop_uncounted);
  if (counts && ++mine[at - start] > most[at - start]) {
    if (most[at - start]++ == 0) touched[addresses++] = (unsigned)(at - start);
  }
}
static inline void start_counting() { asm volatile("pushfq; orq $0x100, (%%rsp); popfq" ::: "memory", "cc"); }
static inline void stop_counting() { asm volatile("pushfq; andq $~0x100, (%%rsp); popfq" ::: "memory", "cc"); }
static void next_lane() {
  for (size_t i = 0; i < addresses; ++i) mine[touched[i]] = 0;
}
static void next_round() {
  for (size_t i = 0; i < addresses; ++i) issued += most[touched[i]], most[touched[i]] = 0;
  addresses = 0;
}
static int started_halves() { return HALVES; }
static void listen() {
  struct sigaction action = {};
  action.sa_sigaction = trapped, action.sa_flags = SA_SIGINFO;
  sigaction(SIGTRAP, &action, nullptr);
}
#else
static inline void start_counting() {}
static inline void stop_counting() {}
static void next_lane() {}
static void next_round() {}
static int started_halves() { return current_wave / 2 % 2 ? 1 : HALVES; }
static void listen() {}
#endif

// -- lanes ---------------------------------------------------------------------------------------------------------------

UNCOUNTED static void run_lane() {
  const unsigned long long* a = arguments;
  typedef unsigned long long u;
  auto call = (void (*)(u, u, u, u, u, u, u, u, u, u, u, u))kernel;
  start_counting();
  call(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11]);
  stop_counting();
  lanes[current].meeting.line = 0;
}

static void meet(char what, unsigned mask, unsigned given) {
  Lane& lane = lanes[current];
  lane.meeting = {line, what, mask};
  lane.given = given;
  swapcontext(&lane.context, &scheduler);
}

static int resume(int half) { // -> lanes of the half that wait
  int waiting = 0;
  for (int turn = 0; turn < HALF; ++turn) {
    current = half * HALF + (current_wave % 2 ? HALF - 1 - turn : turn);
    swapcontext(&scheduler, &lanes[current].context);
    next_lane();
    waiting += lanes[current].meeting.line != 0;
  }
  return waiting;
}

static bool same(const Meeting& a, const Meeting& b) { return a.line == b.line && a.what == b.what && a.mask == b.mask; }

static bool agree(int half) {
  for (int i = half * HALF; i < (half + 1) * HALF; ++i)
    if (!same(lanes[i].meeting, lanes[half * HALF].meeting)) return false;
  for (int i = half * HALF; i < (half + 1) * HALF; ++i) board[i] = lanes[i].given;
  return true;
}

static bool run_wave(char* message, size_t size) {
  static char* stacks = (char*)malloc(WAVE * STACK_BYTES);
  int waiting[HALVES], started = started_halves();
  for (int i = 0; i < WAVE; ++i) {
    getcontext(&lanes[i].context);
    lanes[i].context.uc_stack.ss_sp = stacks + i * STACK_BYTES;
    lanes[i].context.uc_stack.ss_size = STACK_BYTES;
    lanes[i].context.uc_link = &scheduler;
    makecontext(&lanes[i].context, run_lane, 0);
    waiting[i / HALF] = HALF;
  }
  for (bool goes_on = true; goes_on; started = HALVES) {
    for (int half = 0; half < started; ++half)
      if (waiting[half]) waiting[half] = resume(half);
    next_round();
    goes_on = started < HALVES;
    for (int half = 0; half < started; ++half) {
      met[half] = waiting[half] == HALF && agree(half);
      goes_on |= waiting[half] > 0;
      if (met[half] || !waiting[half]) continue;
      int at = 0;
      for (int i = half * HALF; i < (half + 1) * HALF; ++i) at = lanes[i].meeting.line ? lanes[i].meeting.line : at;
      snprintf(message, size, "group %llu: lanes part at the exchange of line %d: %d of 32 came to one",
               current_wave * HALVES + half, at, waiting[half]);
      return false;
    }
  }
  return true;
}

static inline void at(int here) { line = here; }

UNCOUNTED static unsigned shuffled(char what, unsigned x, unsigned by, int from, bool inside) {
  stop_counting();
  meet(what, what == 's' ? 0 : by, x);
  unsigned found = inside ? board[(current & ~31) | (from & 31)] : x;
  start_counting();
  return found;
}

UNCOUNTED static unsigned long long ballot(bool x) {
  stop_counting();
  meet('b', 0, x);
  unsigned long long mask = 0;
  for (int i = 0; i < WAVE; ++i) {
    bool there = i / HALF == current / HALF || (met[i / HALF] && same(lanes[i].meeting, lanes[current].meeting));
    mask |= there && board[i] ? 1ull << i : 0;
  }
  start_counting();
  return mask;
}

struct Place { unsigned x; };
static inline Place thread() { return {(unsigned)((current_wave * WAVE + current) % BLOCK_THREADS)}; }
static inline Place block() { return {(unsigned)((current_wave * WAVE + current) / BLOCK_THREADS)}; }

} // namespace emulator

// -> 0, or 1 with a message. arguments: 12 words, of which the kernel takes as many as it has parameters.
extern "C" int emulate(void (*kernel)(...), const unsigned long long* arguments, unsigned long long waves, char* message, size_t size) {
  emulator::kernel = kernel;
  emulator::arguments = arguments;
  emulator::listen();
  for (unsigned long long i = 0; i < waves; ++i) {
    emulator::current_wave = i;
    if (!emulator::run_wave(message, size)) return 1;
  }
  return 0;
}

// -- what common.cuh names -----------------------------------------------------------------------------------------------

#define __device__
#define __global__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(threads)
#define threadIdx (emulator::thread())
#define blockIdx (emulator::block())
const int warpSize = WAVE;

using emulator::shuffled;
#define LANE ((int)(threadIdx.x & 31))
static inline unsigned __shfl_sync(unsigned, unsigned x, unsigned from) { return shuffled('s', x, 0, from, true); }
static inline unsigned __shfl_xor_sync(unsigned, unsigned x, unsigned mask) { return shuffled('x', x, mask, LANE ^ mask, true); }
static inline unsigned __shfl_up_sync(unsigned, unsigned x, unsigned by) {
  return shuffled('u', x, by, LANE - by, LANE >= (int)by);
}
static inline unsigned __shfl_down_sync(unsigned, unsigned x, unsigned by) {
  return shuffled('d', x, by, LANE + by, LANE + by < 32);
}
static inline unsigned __ballot_sync(unsigned, bool x) { return (unsigned)emulator::ballot(x); }
static inline int __shfl(int x, int from, int) { return (int)__shfl_sync(0, (unsigned)x, (unsigned)from); }
static inline int __shfl_xor(int x, int mask, int) { return (int)__shfl_xor_sync(0, (unsigned)x, (unsigned)mask); }
static inline int __shfl_up(int x, unsigned by, int) { return (int)__shfl_up_sync(0, (unsigned)x, by); }
static inline int __shfl_down(int x, unsigned by, int) { return (int)__shfl_down_sync(0, (unsigned)x, by); }
static inline unsigned long long __ballot(int x) { return emulator::ballot(x != 0); }

static inline float __uint_as_float(unsigned bits) { float x; memcpy(&x, &bits, 4); return x; }
static inline unsigned __float_as_uint(float x) { unsigned bits; memcpy(&bits, &x, 4); return bits; }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
UNCOUNTED static unsigned __brev(unsigned x) {
  emulator::stop_counting();
  unsigned y = 0;
  for (int i = 0; i < 32; i++) y |= (x >> i & 1) << (31 - i);
  emulator::start_counting();
  return y;
}
