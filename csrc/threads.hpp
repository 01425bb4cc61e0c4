// How a call is cut into parts, and who does them. Included by the file that is compiled for the baseline.
#pragma once

#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>

#include <atomic>
#include <thread>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace nc {

constexpr int64_t BYTES_PER_THREAD = 1 << 20;  // less is not worth a thread
constexpr int MAX_THREADS = 64;

// Round to nearest even and no flushing of subnormals, whatever the calling thread has set.
class DefaultFloats {
#if defined(__x86_64__)
  static constexpr unsigned DEFAULT = 0x1f80;
  unsigned saved = _mm_getcsr();

 public:
  DefaultFloats() { _mm_setcsr(DEFAULT); }
  ~DefaultFloats() { _mm_setcsr(saved); }
#elif defined(__aarch64__)
  uint64_t saved;

 public:
  DefaultFloats() {
    asm volatile("mrs %0, fpcr" : "=r"(saved));
    asm volatile("msr fpcr, %0" : : "r"(uint64_t(0)));
  }
  ~DefaultFloats() { asm volatile("msr fpcr, %0" : : "r"(saved)); }
#else
 public:
  DefaultFloats() {}
#endif
  DefaultFloats(const DefaultFloats&) = delete;
};

// How n values are cut into parts of whole grains, one for each thread.
struct Parts {
  int64_t n, per_part;
  int count;

  Parts(int64_t n, int64_t grain, int64_t bytes_per_value, int32_t threads) : n(n) {
    const int64_t grains = (n + grain - 1) / grain;
    int64_t parts = n * bytes_per_value / BYTES_PER_THREAD;
    if (parts > threads) parts = threads;
    if (parts > MAX_THREADS) parts = MAX_THREADS;
    if (parts < 1) parts = 1;
    per_part = (grains + parts - 1) / parts * grain;
    count = int((n + per_part - 1) / per_part);
  }

  int64_t begin(int part) const { return part * per_part; }
  int64_t end(int part) const { return part + 1 == count ? n : (part + 1) * per_part; }
};

// ---- the team that does the parts ---------------------------------------------------------------------------------

using Parallel = void (*)(void (*body)(void*), void* data, unsigned threads, unsigned flags);

// The runtime's threads do not exist in a forked child, and it would wait for them for ever. Watched from the moment the
// library is loaded: torch's threads may have been started before our first call.
inline std::atomic<bool> forked{false};
inline const bool watched = pthread_atfork(nullptr, nullptr, [] { forked.store(true); }) == 0;

// The entry of the OpenMP runtime that torch has loaded, or NULL. Its threads are already there, and are the same ones that
// would otherwise spin beside ours after torch's last parallel loop.
inline Parallel torch_team() {
  static const Parallel found = reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  return watched && !forked.load(std::memory_order_relaxed) ? found : nullptr;
}

// Takes parts until none is left: right with any number of threads, however late they come.
template <class Part>
struct Queue {
  const Part& part;
  const int count;
  std::atomic<int> next{0};

  static void work(void* queue) {
    Queue& self = *static_cast<Queue*>(queue);
    for (int i; (i = self.next.fetch_add(1)) < self.count;) self.part(i);
  }
};

// A thread that cannot be started is not an error: the calling one does its part.
template <class Part>
void start_team(Queue<Part>& queue) {
  std::thread threads[MAX_THREADS];
  try {
    for (int i = 1; i < queue.count; i++) threads[i] = std::thread(Queue<Part>::work, &queue);
  } catch (...) {
  }
  Queue<Part>::work(&queue);
  for (std::thread& thread : threads) {
    if (thread.joinable()) thread.join();
  }
}

// work(part, begin, end) for every part, in as many threads as there are parts: torch's own where it has some, and
// otherwise threads that live for this call.
template <class Work>
void run(const Parts& parts, const Work& work) {
  const auto part = [&](int i) {
    const DefaultFloats floats;
    work(i, parts.begin(i), parts.end(i));
  };
  Queue<decltype(part)> queue{part, parts.count};
  if (parts.count == 1) {
    part(0);
  } else if (const Parallel team = torch_team()) {
    team(Queue<decltype(part)>::work, &queue, unsigned(parts.count), 0);
  } else {
    start_team(queue);
  }
}

}  // namespace nc
