#include "serving/request_queue.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

namespace persia::serving {
namespace {

constexpr double kLately = 0.1;  // the share of the last batch in averages
constexpr double kSlowly = 0.01;
constexpr double kFlat = 1e-3;  // sizes whose variance is a smaller share of their square are equal
// An estimate is exceeded half of the time, and an answer that is late was computed for nothing. So
// a request is admitted if it would wait for less than this share of the time that is left.
constexpr double kAdmittedShare = 0.6;

int64_t SliceOf(Clock::time_point time) {
  return time.time_since_epoch() / std::chrono::milliseconds(50);
}

double Seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

std::string InSeconds(double seconds) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.2f s", seconds);
  return text.data();
}

}  // namespace

// ---- times of batches

void BatchTimes::Add(uint32_t num_samples, double took_s) {
  const double size = num_samples;
  const std::array<double, 4> values = {size, took_s, size * took_s, size * size};
  for (size_t i = 0; i < means_.size(); ++i) {
    means_[i] = is_empty_ ? values[i] : means_[i] + kLately * (values[i] - means_[i]);
  }
  is_empty_ = false;
}

double BatchTimes::Estimate(uint64_t num_batches, uint64_t num_samples) const {
  if (is_empty_) return 0;
  const auto [size, took_s, product, square] = means_;
  const double variance = square - size * size;
  // Of equal sizes nothing is known: all is taken for the batches', so that no request is refused
  // that need not be.
  double sample_s = 0;
  if (variance > kFlat * square) sample_s = std::max(0.0, product - size * took_s) / variance;
  const double batch_s = std::max(0.0, took_s - sample_s * size);
  return static_cast<double>(num_batches) * batch_s + static_cast<double>(num_samples) * sample_s;
}

// ---- reservations

int64_t Reservations::Add(Clock::time_point now) {
  const int64_t number = SliceOf(now);
  Slice& slice = slices_[number % 2];
  if (slice.number != number) slice = {.number = number};
  ++slice.num;
  return number;
}

void Reservations::Remove(int64_t number) {
  Slice& slice = slices_[number % 2];
  if (slice.number == number) --slice.num;
}

uint32_t Reservations::Count(Clock::time_point now) const {
  uint32_t num = 0;
  for (const Slice& slice : slices_) num += slice.number + 1 >= SliceOf(now) ? slice.num : 0;
  return num;
}

// ---- a batch

Batch::Batch(std::vector<std::shared_ptr<Waiting>> requests, RequestQueue* queue, bool is_part)
    : requests_(std::move(requests)), queue_(*queue), is_part_(is_part) {
  for (const auto& request : requests_) num_samples_ += request->size();
  queue_.Begin(*this);
}

Batch::~Batch() {
  if (!requests_.empty()) Fail(GrpcCode::kInternal, "the request's batch was not computed");
}

StatusOr<std::vector<std::byte>> Batch::Message() const {
  std::vector<const Samples*> parts;
  parts.reserve(requests_.size());
  for (const auto& request : requests_) parts.push_back(&request->samples());
  return Merge(parts);
}

// Before the answers: who has the last of them sees no request running. Without effect on a batch
// that has ended.
void Batch::End(bool is_computed) {
  if (requests_.empty()) return;
  const bool is_timed = is_computed && !is_part_;
  queue_.End(*this, is_timed ? std::optional(Clock::now() - began_) : std::nullopt);
}

void Batch::Answer(const Prediction& prediction) {
  End(true);
  uint32_t begin = 0;
  const auto requests = std::exchange(requests_, {});
  for (const auto& request : requests) {
    request->Answer(prediction, begin);
    begin += request->size();
  }
  for (const auto& request : requests) request->Deliver();
}

void Batch::Fail(GrpcCode code, const std::string& message) {
  End(true);
  const auto requests = std::exchange(requests_, {});
  for (const auto& request : requests) request->Fail(code, message);
  for (const auto& request : requests) request->Deliver();
}

std::vector<std::unique_ptr<Batch>> Batch::Split() {
  End(false);
  std::vector<std::unique_ptr<Batch>> parts;
  for (auto& request : std::exchange(requests_, {})) {
    parts.push_back(std::make_unique<Batch>(std::vector{std::move(request)}, &queue_, true));
  }
  return parts;
}

// ---- the queue

Status RequestQueue::Submit(std::shared_ptr<Waiting> request) {
  if (request->size() > options_.max_batch_size) {
    return InvalidArgument("the batch has ", request->size(), " samples, this server takes ",
                           options_.max_batch_size,
                           " at a time: send several requests, or raise --max-batch-size");
  }
  {
    const std::lock_guard lock(mutex_);
    PERSIA_RETURN_IF_ERROR(AdmitLocked(request->deadline(), request->size()));
    num_samples_ += request->size();
    const double size = request->size();
    usual_samples_ =
        usual_samples_ == 0 ? size : usual_samples_ + kLately * (size - usual_samples_);
    const double least = least_samples_ + kSlowly * (size - least_samples_);
    least_samples_ = least_samples_ == 0 ? size : std::min(size, least);
    waiting_.push_back(std::move(request));
  }
  changed_.notify_one();
  return Status::Ok();
}

StatusOr<RequestQueue::Place> RequestQueue::Admit(Clock::time_point deadline) {
  const std::lock_guard lock(mutex_);
  const auto now = Clock::now();
  const uint32_t num_reserved = reservations_.Count(now);
  // The size of its own is not known yet. With that of a usual one, a small request beside large
  // ones would be refused although it fits. Without any, requests of one size would be admitted
  // here, sent, and refused by Submit as long as the queue has its most.
  const auto num_samples = static_cast<uint32_t>(num_reserved * usual_samples_ + least_samples_);
  PERSIA_RETURN_IF_ERROR(AdmitLocked(deadline, num_samples, num_reserved));
  return Place(this, reservations_.Add(now));
}

void RequestQueue::GiveBack(int64_t slice) {
  const std::lock_guard lock(mutex_);
  reservations_.Remove(slice);
}

// `num_samples`: its own, with those of the `num_reserved` requests that will be ahead of it.
Status RequestQueue::AdmitLocked(Clock::time_point deadline, uint32_t num_samples,
                                 uint32_t num_reserved) const {
  if (closed_) return Unavailable("the server is stopping: ask another one");
  const size_t num_ahead = waiting_.size() + num_reserved;
  if (num_ahead >= options_.max_queued) {
    return ResourceExhausted(num_ahead,
                             " requests wait already (--max-queued): try again later, or ask "
                             "another server");
  }
  // An idle server takes every request: the estimate may be of a time when it was slow.
  if (num_ahead == 0 && num_running_ == 0) return Status::Ok();
  const auto now = Clock::now();
  const double left_s = Seconds(deadline - now);
  const double wait_s = EstimateLocked(num_samples, now);
  if (wait_s > kAdmittedShare * left_s && wait_s > 0) {
    return ResourceExhausted(
        "the answer is expected in ", InSeconds(wait_s), ", more than ",
        std::lround(100 * kAdmittedShare), " % of the ", InSeconds(std::max(0.0, left_s)),
        " that the client still waits: try again later, or ask another server");
  }
  return Status::Ok();
}

// Until a request with so many samples that is queued now would have its answer.
double RequestQueue::EstimateLocked(uint32_t num_samples, Clock::time_point now) const {
  const auto batches = [&](uint64_t samples) {
    return (samples + options_.max_batch_size - 1) / options_.max_batch_size;
  };
  const uint64_t ahead = num_samples_ + num_samples;
  double wait_s = times_.Estimate(batches(ahead), ahead) / options_.num_threads;
  if (num_running_ > 0) {
    const double running_s =
        times_.Estimate(std::max(num_parts_, 1u), running_samples_) - Seconds(now - began_);
    wait_s += std::max(0.0, running_s) / options_.num_threads;
  }
  return wait_s;
}

std::unique_ptr<Batch> RequestQueue::Next() {
  while (true) {
    Requests late;
    Requests taken;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return !waiting_.empty() || closed_; });
      if (waiting_.empty()) return nullptr;
      // Counted from the moment a thread is free, so that a busy server adds no delay to that of
      // the queue.
      if (options_.max_delay.count() > 0) {
        changed_.wait_for(lock, options_.max_delay,
                          [&] { return closed_ || num_samples_ >= options_.max_batch_size; });
      }
      DropLate(&late);
      taken = Take();
      // The signal for what is left may have gone to this thread while it waited for more.
      if (!waiting_.empty()) changed_.notify_one();
    }
    for (const auto& one : late) {
      one->Fail(GrpcCode::kDeadlineExceeded,
                "the request's deadline passed while it was queued: the server is behind");
    }
    if (!taken.empty()) return std::make_unique<Batch>(std::move(taken), this);
  }
}

// Removes requests that were given up, or whose deadline has passed, wherever they wait.
void RequestQueue::DropLate(Requests* late) {
  const auto now = Clock::now();
  const auto is_late = [&](const std::shared_ptr<Waiting>& request) {
    if (request->deadline() > now && !request->given_up()) return false;
    num_samples_ -= request->size();
    late->push_back(request);
    return true;
  };
  std::erase_if(waiting_, is_late);
}

RequestQueue::Requests RequestQueue::Take() {
  Requests taken;
  uint64_t num_samples = 0;
  while (!waiting_.empty()) {
    const auto& next = waiting_.front();
    num_samples += next->size();
    // Stops at the first that does not fit: taking later ones out of order could starve it.
    if (!taken.empty() && (num_samples > options_.max_batch_size ||
                           !HaveOneLayout(next->samples(), taken.front()->samples()))) {
      break;
    }
    num_samples_ -= next->size();
    taken.push_back(next);
    waiting_.pop_front();
  }
  return taken;
}

void RequestQueue::Begin(const Batch& batch) {
  const std::lock_guard lock(mutex_);
  num_running_ += static_cast<uint32_t>(batch.num_requests());
  running_samples_ += batch.num_samples();
  if (batch.is_part()) ++num_parts_;
  began_ = Clock::now();
}

void RequestQueue::End(const Batch& batch, std::optional<Clock::duration> took) {
  const std::lock_guard lock(mutex_);
  if (took.has_value()) times_.Add(batch.num_samples(), Seconds(*took));
  num_running_ -= static_cast<uint32_t>(batch.num_requests());
  running_samples_ -= batch.num_samples();
  if (!batch.is_part()) return;
  --num_parts_;
  began_ = Clock::now();  // the next part
}

void RequestQueue::Close() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  changed_.notify_all();
}

uint32_t RequestQueue::num_waiting() const {
  const std::lock_guard lock(mutex_);
  return static_cast<uint32_t>(waiting_.size());
}

uint32_t RequestQueue::num_running() const {
  const std::lock_guard lock(mutex_);
  return num_running_;
}

}  // namespace persia::serving
