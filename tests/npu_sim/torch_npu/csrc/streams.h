// Streams and events of the stand-in: a queue of jobs each, run by a thread of its own, in order and late.
#pragma once

#include <Python.h>

#include <c10/core/Device.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace npu_sim {

constexpr auto kNpu = c10::DeviceType::PrivateUse1;
using Clock = std::chrono::steady_clock;

inline int64_t setting(const char* name, int64_t fallback) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? std::atoll(value) : fallback;
}

inline int device_count() {
  static const int count = static_cast<int>(setting("NPU_SIM_DEVICES", 8));
  return count;
}

// How late a job is that nobody waits for: late enough that a missing wait shows as old bytes.
inline Clock::duration lateness() { return std::chrono::microseconds(setting("NPU_SIM_COPY_DELAY_US", 500)); }

// ---------------------------------------------------------------- this process and its devices
inline std::atomic<bool> in_use{false};  // has this process touched a device?
inline std::atomic<bool> forked{false};  // or its parent, whose threads and memory it has not got?

inline void mark_fork() { forked = forked || in_use; }

// Called by everything that needs a device.
inline void use_device() {
  TORCH_CHECK(!forked,
              "Cannot re-initialize NPU in forked subprocess. To use NPU with multiprocessing, you must use the "
              "'spawn' start method");
  if (!in_use.exchange(true)) pthread_atfork(nullptr, nullptr, &mark_fork);
}

inline thread_local int current_device = 0;

inline c10::Device device_at(int index) { return {kNpu, static_cast<c10::DeviceIndex>(index)}; }

// ---------------------------------------------------------------- queues
class Queue;

// While a thread waits, Python belongs to others: what a job holds may be theirs to let go of. Operators do not always
// give it away themselves, those of tensors that are dispatched twice, say.
class WithoutPython {
 public:
  WithoutPython() : state_(Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutPython() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }
  WithoutPython(const WithoutPython&) = delete;

 private:
  PyThreadState* state_;
};

// A place in a queue: reached when the job of that number, and all before it, are done.
struct Mark {
  Queue* queue = nullptr;
  uint64_t ticket = 0;

  bool reached() const;
  void wait() const;
};

class Queue {
 public:
  // A job begins when all before it are done, and not before `delay` has passed. Whoever waits for it is not kept so
  // long: the waiting thread runs it. So waiting costs little, and what was not waited for is late by the whole delay.
  Mark post(std::function<void()> work, Clock::duration delay = {}) {
    return add({std::move(work), Clock::now() + delay, {}});
  }

  // What is posted from now on begins after `other`, and fails if that failed.
  Mark post_wait(const Mark& other) {
    return add({[other] { other.queue->rethrow(other.ticket); }, {}, other});
  }

  Mark last() {
    std::lock_guard<std::mutex> lock(mutex_);
    return {this, posted_};
  }

  bool reached(uint64_t ticket) const { return done_ >= ticket; }

  void wait(uint64_t ticket) {
    finish(ticket);
    rethrow(ticket);
  }

  // Waits, and leaves what went wrong to be raised at the next wait.
  void finish(uint64_t ticket) {
    if (reached(ticket)) return;
    const WithoutPython others_may;
    std::unique_lock<std::mutex> lock(mutex_);
    while (!reached(ticket)) {
      if (running_) {
        changed_.wait(lock);
        continue;
      }
      const auto after = jobs_.front().after;
      if (after.queue != nullptr && !after.reached()) {
        lock.unlock();
        after.queue->finish(after.ticket);
        lock.lock();
      } else {
        run_next(lock);
      }
    }
  }

  // Leaves the work to the queue's own thread. False: it was not done by then.
  bool wait_until(uint64_t ticket, Clock::time_point deadline) {
    const WithoutPython others_may;
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_until(lock, deadline, [&] { return reached(ticket); });
  }

  // Raises what a job up to this one has raised, once.
  void rethrow(uint64_t ticket) {
    std::exception_ptr error;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (failed_at_ <= ticket) std::swap(error, failure_);
    }
    if (error) std::rethrow_exception(error);
  }

 private:
  struct Job {
    std::function<void()> work;
    Clock::time_point not_before;
    Mark after;
  };

  Mark add(Job job) {
    use_device();
    std::lock_guard<std::mutex> lock(mutex_);
    if (posted_ == 0) std::thread(&Queue::work, this).detach();
    jobs_.push_back(std::move(job));
    if (jobs_.size() == 1) changed_.notify_all();
    return {this, ++posted_};
  }

  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return !jobs_.empty() && !running_; });
      const auto not_before = jobs_.front().not_before;
      const auto after = jobs_.front().after;
      if (after.queue != nullptr && !after.reached()) {
        lock.unlock();
        after.queue->wait_idly(after.ticket);
        lock.lock();
      } else if (Clock::now() < not_before) {
        changed_.wait_until(lock, not_before);
      } else {
        run_next(lock);
      }
    }
  }

  void wait_idly(uint64_t ticket) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return reached(ticket); });
  }

  void run_next(std::unique_lock<std::mutex>& lock) {
    auto job = std::move(jobs_.front());
    jobs_.pop_front();
    running_ = true;
    lock.unlock();
    std::exception_ptr error;
    try {
      // The thread that waits may be inside a dispatch mode or a backward pass, which are not meant for this.
      c10::impl::ForceDispatchKeyGuard plain(c10::default_included_set, c10::default_excluded_set);
      job.work();
    } catch (...) {
      error = std::current_exception();
    }
    job.work = nullptr;  // what it holds goes before anybody hears that it is done
    lock.lock();
    running_ = false;
    if (error && !failure_) {
      failure_ = error;
      failed_at_ = done_ + 1;
    }
    ++done_;
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  uint64_t posted_ = 0;
  std::atomic<uint64_t> done_{0};
  bool running_ = false;
  std::exception_ptr failure_;
  uint64_t failed_at_ = 0;
};

inline bool Mark::reached() const { return queue->reached(ticket); }
inline void Mark::wait() const { queue->wait(ticket); }

// ---------------------------------------------------------------- streams: the queues of the devices, by number
using StreamKey = std::pair<int, int64_t>;  // device, stream; 0 is a device's default stream

constexpr int64_t kPooledStreams = 32;  // as many as torch has of each device before it gives out the first one again

struct Streams {
  std::mutex mutex;
  std::map<StreamKey, Queue*> queues;  // for good: a mark may point to one as long as the process lives
  std::map<int, int64_t> given;
  int64_t private_ones = 0;
};

inline Streams& streams() {
  static auto* all = new Streams();  // never destroyed: threads run until the process ends
  return *all;
}

inline Queue& queue_of(StreamKey key) {
  std::lock_guard<std::mutex> lock(streams().mutex);
  auto& queue = streams().queues[key];
  if (queue == nullptr) queue = new Queue();
  return *queue;
}

inline int64_t pooled_stream(int device) {
  std::lock_guard<std::mutex> lock(streams().mutex);
  return 1 + streams().given[device]++ % kPooledStreams;
}

// A stream that nobody else is given.
inline int64_t private_stream() {
  std::lock_guard<std::mutex> lock(streams().mutex);
  return 1 + kPooledStreams + streams().private_ones++;
}

inline thread_local std::map<int, int64_t> current_streams;

inline StreamKey current_stream(int device) {
  const auto found = current_streams.find(device);
  return {device, found == current_streams.end() ? 0 : found->second};
}

inline std::vector<Mark> last_marks(const std::function<bool(const StreamKey&)>& wanted) {
  std::vector<Mark> marks;
  std::lock_guard<std::mutex> lock(streams().mutex);
  for (auto& [key, queue] : streams().queues) {
    if (wanted(key)) marks.push_back(queue->last());
  }
  return marks;
}

// Wait for all streams of a device.
inline void drain(int device) {
  use_device();
  for (auto& mark : last_marks([&](auto& key) { return key.first == device; })) mark.wait();
}

// Wait for the streams that are current on this thread. Work on other streams stays pending, so a missing wait_stream,
// event or synchronize shows.
inline void settle() {
  for (auto& mark : last_marks([](auto& key) { return key == current_stream(key.first); })) mark.wait();
}

}  // namespace npu_sim
