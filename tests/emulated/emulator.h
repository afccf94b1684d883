// A group of 32 lanes on a CPU: each lane is a fiber that runs until its next exchange, then the next lane does.
//
//     round k    lane 0  ----> shuffle     lane 1 ----> shuffle   ..   lane 31 ----> shuffle
//                                                                                          `- all at the same? then round k + 1
//
// Groups run one after another, lanes of odd groups backwards, so that what one lane leaves in memory for another without
// an exchange between them differs from the truth in one of both. Lanes that meet at different exchanges, or of which only
// some have returned, would hang or compute nonsense on a device: here they end the launch with a message.

#include <cstdio>
#include <cstdlib>
#include <ucontext.h>

namespace emulator {

const int LANES = 32;
const size_t STACK_BYTES = 256 << 10;

struct Meeting { int line; char what; unsigned mask; };

struct Lane {
  ucontext_t context;
  Meeting meeting; // where it waits; line 0: it has returned
  unsigned given, taken[LANES];
};

static Lane lanes[LANES];
static ucontext_t scheduler;
static int current;
static unsigned long long current_group;
static unsigned board[LANES];
static void (*kernel)(...);
static const unsigned long long* arguments;

static void run_lane() {
  const unsigned long long* a = arguments;
  typedef unsigned long long u;
  ((void (*)(u, u, u, u, u, u, u, u, u, u, u, u))kernel)(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11]);
  lanes[current].meeting.line = 0;
}

static void meet(int line, char what, unsigned mask, unsigned given) {
  Lane& lane = lanes[current];
  lane.meeting = {line, what, mask};
  lane.given = given;
  swapcontext(&lane.context, &scheduler);
}

static int resume_all() { // -> lanes that wait
  int waiting = 0;
  for (int turn = 0; turn < LANES; ++turn) {
    current = current_group % 2 ? LANES - 1 - turn : turn;
    swapcontext(&scheduler, &lanes[current].context);
    waiting += lanes[current].meeting.line != 0;
  }
  return waiting;
}

static bool agree() {
  for (int i = 0; i < LANES; ++i) {
    const Meeting &mine = lanes[i].meeting, &first = lanes[0].meeting;
    if (mine.line != first.line || mine.what != first.what || mine.mask != first.mask) return false;
    board[i] = lanes[i].given;
  }
  return true;
}

static bool run_group(char* message, size_t size) {
  static char* stacks = (char*)malloc(LANES * STACK_BYTES);
  for (int i = 0; i < LANES; ++i) {
    getcontext(&lanes[i].context);
    lanes[i].context.uc_stack.ss_sp = stacks + i * STACK_BYTES;
    lanes[i].context.uc_stack.ss_size = STACK_BYTES;
    lanes[i].context.uc_link = &scheduler;
    makecontext(&lanes[i].context, run_lane, 0);
  }
  while (int waiting = resume_all()) {
    if (waiting == LANES && agree()) continue;
    int at = 0;
    for (int i = 0; i < LANES; ++i) at = lanes[i].meeting.line ? lanes[i].meeting.line : at;
    snprintf(message, size, "group %llu: lanes part at the exchange of line %d: %d of 32 came to one", current_group, at, waiting);
    return false;
  }
  return true;
}

} // namespace emulator

// -> 0, or 1 with a message. arguments: 12 words, of which the kernel takes as many as it has parameters.
extern "C" int emulate(void (*kernel)(...), const unsigned long long* arguments, unsigned long long groups, char* message, size_t size) {
  emulator::kernel = kernel;
  emulator::arguments = arguments;
  for (unsigned long long i = 0; i < groups; ++i) {
    emulator::current_group = i;
    if (!emulator::run_group(message, size)) return 1;
  }
  return 0;
}

static inline unsigned lane() { return emulator::current; }
static inline unsigned long long group() { return emulator::current_group; }

static inline unsigned shuffle(unsigned x, unsigned from, int line = __builtin_LINE()) {
  emulator::meet(line, 's', 0, x);
  return emulator::board[from % 32];
}
static inline unsigned shuffle_xor(unsigned x, unsigned mask, int line = __builtin_LINE()) {
  emulator::meet(line, 'x', mask, x);
  return emulator::board[(lane() ^ mask) % 32];
}
static inline unsigned shuffle_up(unsigned x, unsigned delta, int line = __builtin_LINE()) {
  emulator::meet(line, 'u', delta, x);
  return lane() >= delta ? emulator::board[lane() - delta] : x;
}
static inline unsigned shuffle_down(unsigned x, unsigned delta, int line = __builtin_LINE()) {
  emulator::meet(line, 'd', delta, x);
  return lane() + delta < 32 ? emulator::board[lane() + delta] : x;
}
static inline unsigned votes(bool x, int line = __builtin_LINE()) {
  emulator::meet(line, 'b', 0, x);
  unsigned mask = 0;
  for (int i = 0; i < emulator::LANES; ++i) mask |= (emulator::board[i] != 0 ? 1u : 0u) << i;
  return mask;
}
