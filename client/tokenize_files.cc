#include "client/tokenize_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <filesystem>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "common/files.h"
#include "common/status_macros.h"
#include "common/text/documents.h"

namespace zeroshard {
namespace {

namespace fs = std::filesystem;

// A line that is longer than this is refused where it is parsed.
constexpr size_t kLongestLine = (64 << 20) + 1;

struct InputText {
  std::string path;
  int64_t bytes = 0;
};

absl::Status ListFailed(const std::string& path, const std::error_code& error) {
  return ErrnoError(error.value(), "read", path);
}

// Files as they are named, folders as the files below them in the order of their paths. Names that
// start with a dot are left out of folders.
absl::StatusOr<std::vector<InputText>> ListInputs(const std::vector<std::string>& inputs,
                                                  const std::string& output) {
  std::vector<InputText> files;
  const auto add = [&](const std::string& path) -> absl::Status {
    std::error_code error;
    const fs::file_status status = fs::status(path, error);
    if (!fs::exists(status)) return absl::NotFoundError(absl::StrCat("there is no ", path));
    if (!fs::is_regular_file(status)) {
      return absl::InvalidArgumentError(absl::StrCat(path, " is neither a file nor a folder"));
    }
    if (fs::equivalent(path, output, error)) {
      return absl::InvalidArgumentError(absl::StrCat(
          path, " is among the texts and is where the tokens would go; give another -o"));
    }
    const auto size = fs::file_size(path, error);
    if (error) return ListFailed(path, error);
    files.push_back({path, static_cast<int64_t>(size)});
    return absl::OkStatus();
  };
  for (const std::string& input : inputs) {
    std::error_code error;
    if (!fs::is_directory(input, error)) {
      ZS_RETURN_IF_ERROR(add(input));
      continue;
    }
    std::vector<std::string> found;
    fs::recursive_directory_iterator entry(input, error);
    for (; !error && entry != fs::recursive_directory_iterator(); entry.increment(error)) {
      std::error_code ignored;
      const bool hidden = entry->path().filename().native()[0] == '.';
      if (hidden && entry->is_directory(ignored)) entry.disable_recursion_pending();
      if (!hidden && entry->is_regular_file(ignored)) found.push_back(entry->path().string());
    }
    if (error) return ListFailed(input, error);
    if (found.empty()) {
      return absl::InvalidArgumentError(absl::StrCat("there are no files in ", input));
    }
    std::sort(found.begin(), found.end());
    for (const std::string& path : found) ZS_RETURN_IF_ERROR(add(path));
  }
  return files;
}

// The rename at the end would put a file in place of whatever is there.
absl::Status CheckOutput(const std::string& path) {
  std::error_code error;
  const fs::file_status status = fs::symlink_status(path, error);
  if (!fs::exists(status) || fs::is_regular_file(status)) return absl::OkStatus();
  const char* kind = "a device or a socket";
  if (fs::is_symlink(status)) {
    const fs::path target = fs::read_symlink(path, error);
    return absl::InvalidArgumentError(
        absl::StrCat("-o is ", path, ", a symbolic link to ", target.string(),
                     "; wanted a file or a new name: give the target's own path"));
  }
  if (fs::is_directory(status)) kind = "a folder";
  if (fs::is_fifo(status)) kind = "a named pipe";
  return absl::InvalidArgumentError(
      absl::StrCat("-o is ", path, ", ", kind, "; wanted a file or a new name"));
}

// What one thread encodes at a time.
struct Piece {
  std::string path;
  TextFormat format = TextFormat::kText;
  std::string bytes;
  bool ends_document = false;  // of a text
  int64_t first_line = 1;      // of JSON lines

  // The answer.
  absl::Status status;
  std::vector<int32_t> ids;
  int64_t documents = 0;
  bool done = false;
};

// Files as pieces, in order.
class PieceReader {
 public:
  PieceReader(const Tokenizer& tokenizer, const TokenizeOptions& options,
              std::vector<InputText> files)
      : tokenizer_(tokenizer), options_(options), files_(std::move(files)) {}
  ~PieceReader() { Close(); }

  int64_t bytes_read() const { return bytes_read_; }

  // Null at the end.
  absl::StatusOr<std::unique_ptr<Piece>> Next() {
    while (true) {
      if (file_ < 0) {
        if (next_ == files_.size()) return nullptr;
        ZS_RETURN_IF_ERROR(Open(files_[next_++].path));
      }
      std::unique_ptr<Piece> piece;
      if (format_ == TextFormat::kText) {
        ZS_ASSIGN_OR_RETURN(piece, NextOfText());
      } else {
        ZS_ASSIGN_OR_RETURN(piece, NextOfLines());
      }
      if (piece == nullptr) {
        Close();
        continue;
      }
      piece->path = path_;
      piece->format = format_;
      return piece;
    }
  }

 private:
  absl::Status Open(const std::string& path) {
    path_ = path;
    file_ = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (file_ < 0) return ErrnoError(errno, "open", path);
    ZS_ASSIGN_OR_RETURN(const std::string start, Start());
    ZS_ASSIGN_OR_RETURN(format_, TextFormatOf(path, options_.format, start));
    buffer_.clear();
    ended_ = false;
    any_text_ = false;
    line_ = 1;
    ZS_RETURN_IF_ERROR(Fill(options_.piece_bytes));
    buffer_ = std::string(WithoutByteOrderMark(buffer_));
    return absl::OkStatus();
  }

  void Close() {
    if (file_ >= 0) close(file_);
    file_ = -1;
  }

  // What the format is told by; one byte more tells whether it is the whole file.
  absl::StatusOr<std::string> Start() const {
    std::string start(kFormatBytes + 1, '\0');
    size_t had = 0;
    while (had < start.size()) {
      const ssize_t count =
          pread(file_, start.data() + had, start.size() - had, static_cast<off_t>(had));
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) return ErrnoError(errno, "read", path_);
      if (count == 0) break;
      had += static_cast<size_t>(count);
    }
    start.resize(had);
    return start;
  }

  // Reads until there are `wanted` bytes, or the file ends.
  absl::Status Fill(size_t wanted) {
    wanted = std::max<size_t>(wanted, 4);  // a whole character, and a byte order mark
    while (!ended_ && buffer_.size() < wanted) {
      const size_t had = buffer_.size();
      buffer_.resize(wanted);
      const ssize_t count = read(file_, buffer_.data() + had, wanted - had);
      const int error = errno;
      buffer_.resize(had + static_cast<size_t>(std::max<ssize_t>(count, 0)));
      if (count < 0 && error == EINTR) continue;
      if (count < 0) return ErrnoError(error, "read", path_);
      ended_ = count == 0;
      bytes_read_ += count;
    }
    return absl::OkStatus();
  }

  std::unique_ptr<Piece> Take(size_t bytes) {
    auto piece = std::make_unique<Piece>();
    piece->bytes = buffer_.substr(0, bytes);
    buffer_.erase(0, bytes);
    return piece;
  }

  absl::StatusOr<std::unique_ptr<Piece>> NextOfText() {
    size_t from = options_.piece_bytes;  // no cut before
    size_t wanted = 2 * options_.piece_bytes;
    while (true) {
      ZS_RETURN_IF_ERROR(Fill(wanted));
      if (ended_ && buffer_.size() <= options_.piece_bytes) {
        if (buffer_.empty() && !any_text_) return nullptr;
        any_text_ = false;
        std::unique_ptr<Piece> piece = Take(buffer_.size());
        piece->ends_document = true;
        return piece;
      }
      // The character after a cut is looked at: it must be whole.
      const size_t limit = ended_ ? buffer_.size() : buffer_.size() - 4;
      const size_t cut = tokenizer_.SafeCut(buffer_, from, limit);
      if (cut < limit || ended_) {
        any_text_ = true;
        return Take(cut);
      }
      from = std::max(from, limit);
      wanted = 2 * buffer_.size();
    }
  }

  absl::StatusOr<std::unique_ptr<Piece>> NextOfLines() {
    size_t wanted = options_.piece_bytes;
    while (true) {
      ZS_RETURN_IF_ERROR(Fill(wanted));
      if (buffer_.empty()) return nullptr;
      size_t end = ended_ ? buffer_.size() : buffer_.rfind('\n') + 1;       // 0: no whole line
      if (end == 0 && buffer_.size() > kLongestLine) end = buffer_.size();  // to be refused
      if (end != 0) {
        std::unique_ptr<Piece> piece = Take(end);
        piece->first_line = line_;
        line_ += std::count(piece->bytes.begin(), piece->bytes.end(), '\n');
        return piece;
      }
      wanted = 2 * buffer_.size();
    }
  }

  const Tokenizer& tokenizer_;
  const TokenizeOptions& options_;
  const std::vector<InputText> files_;
  size_t next_ = 0;

  int file_ = -1;
  std::string path_;
  TextFormat format_ = TextFormat::kText;
  std::string buffer_;
  bool ended_ = false;
  bool any_text_ = false;  // pieces of this document were handed out
  int64_t line_ = 1;
  int64_t bytes_read_ = 0;
};

absl::Status EncodePiece(const Tokenizer& tokenizer, const TokenizeOptions& options, Piece* piece) {
  const auto end_document = [&] {
    ++piece->documents;
    if (options.separator.has_value()) piece->ids.push_back(*options.separator);
  };
  if (piece->format == TextFormat::kText) {
    tokenizer.Encode(piece->bytes, &piece->ids);
    if (piece->ends_document) end_document();
    return absl::OkStatus();
  }
  return ForEachJsonLine(
      piece->path, piece->bytes, piece->first_line, [&](Document&& document) -> absl::Status {
        if (!document.prompt.empty()) {
          return absl::InvalidArgumentError(absl::StrCat(
              piece->path, ":", document.line,
              ": has a prompt, whose tokens carry no loss, which a token file cannot say; name the "
              "JSON lines themselves in data.train, with data.tokenizer"));
        }
        if (document.text.empty()) return absl::OkStatus();
        tokenizer.Encode(document.text, &piece->ids);
        end_document();
        return absl::OkStatus();
      });
}

// Threads that encode pieces. Pieces are the caller's until Wait has returned.
class Encoders {
 public:
  Encoders(const Tokenizer& tokenizer, const TokenizeOptions& options) {
    for (int i = 0; i < options.threads; ++i) {
      threads_.emplace_back([this, &tokenizer, &options] { Run(tokenizer, options); });
    }
  }
  ~Encoders() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  void Add(Piece* piece) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      queue_.push_back(piece);
    }
    changed_.notify_all();
  }

  void Wait(const Piece& piece) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return piece.done; });
  }

 private:
  void Run(const Tokenizer& tokenizer, const TokenizeOptions& options) {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
      if (stopping_) return;
      Piece* piece = queue_.front();
      queue_.pop_front();
      lock.unlock();
      absl::Status status;
      try {
        status = EncodePiece(tokenizer, options, piece);
      } catch (const std::exception& error) {
        status = absl::ResourceExhaustedError(absl::StrCat(piece->path, ": ", error.what()));
      }
      lock.lock();
      piece->status = std::move(status);
      piece->done = true;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Piece*> queue_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

// The file, under another name until it is whole.
class TokenFileWriter {
 public:
  TokenFileWriter(const std::string& path, bool wide, int64_t most_tokens)
      : path_(path),
        temporary_(absl::StrCat(path, ".tmp.", getpid())),
        wide_(wide),
        most_tokens_(most_tokens) {}
  ~TokenFileWriter() {
    if (file_ >= 0) close(file_);
    if (made_) unlink(temporary_.c_str());
  }

  int64_t tokens() const { return tokens_; }

  absl::Status Open() {
    file_ = open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (file_ < 0) return ErrnoError(errno, "create", temporary_);
    made_ = true;
    return WriteHeader();
  }

  absl::Status Append(const std::vector<int32_t>& ids) {
    tokens_ += static_cast<int64_t>(ids.size());
    if (tokens_ > most_tokens_) {
      return absl::OutOfRangeError(
          absl::StrCat("there are more than ", most_tokens_,
                       " tokens, which is what the header of one token file can count; write "
                       "several files, of a part of the texts each, and name them all in "
                       "data.train"));
    }
    if (wide_) return Write(ids.data(), ids.size() * sizeof(int32_t));
    narrow_.assign(ids.begin(), ids.end());
    return Write(narrow_.data(), narrow_.size() * sizeof(uint16_t));
  }

  absl::Status Finish() {
    if (lseek(file_, 0, SEEK_SET) != 0) return ErrnoError(errno, "write", temporary_);
    ZS_RETURN_IF_ERROR(WriteHeader());
    if (fsync(file_) != 0) return ErrnoError(errno, "sync", temporary_);
    if (rename(temporary_.c_str(), path_.c_str()) != 0) return ErrnoError(errno, "rename", path_);
    made_ = false;
    const fs::path folder = fs::path(path_).parent_path();
    const int parent = open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_CLOEXEC);
    if (parent < 0) return ErrnoError(errno, "open", folder.string());
    const int synced = fsync(parent);
    const int error = errno;
    close(parent);
    return synced == 0 ? absl::OkStatus() : ErrnoError(error, "sync", folder.string());
  }

 private:
  absl::Status WriteHeader() {
    int32_t header[256] = {wide_ ? 20240801 : 20240520, wide_ ? 7 : 1,
                           static_cast<int32_t>(tokens_)};
    return Write(header, sizeof(header));
  }

  absl::Status Write(const void* data, size_t bytes) {
    const char* from = static_cast<const char*>(data);
    while (bytes > 0) {
      const ssize_t count = write(file_, from, bytes);
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) return ErrnoError(errno, "write", temporary_);
      from += count;
      bytes -= static_cast<size_t>(count);
    }
    return absl::OkStatus();
  }

  const std::string path_;
  const std::string temporary_;
  const bool wide_;
  const int64_t most_tokens_;
  int file_ = -1;
  bool made_ = false;
  int64_t tokens_ = 0;
  std::vector<uint16_t> narrow_;
};

}  // namespace

absl::StatusOr<TokenizeProgress> TokenizeFiles(
    const Tokenizer& tokenizer, const TokenizeOptions& options,
    const std::function<void(const TokenizeProgress&)>& progress) {
  ZS_RETURN_IF_ERROR(CheckOutput(options.output));
  if (options.separator.has_value() &&
      (*options.separator < 0 || *options.separator >= tokenizer.vocab_size())) {
    return absl::InvalidArgumentError(absl::StrCat("the separator is ", *options.separator,
                                                   "; the tokenizer's ids are 0 to ",
                                                   tokenizer.vocab_size() - 1));
  }
  ZS_ASSIGN_OR_RETURN(std::vector<InputText> files, ListInputs(options.inputs, options.output));
  TokenizeProgress so_far;
  for (const InputText& file : files) so_far.total_bytes += file.bytes;
  TokenFileWriter writer(options.output, tokenizer.vocab_size() > 65536, options.most_tokens);
  ZS_RETURN_IF_ERROR(writer.Open());

  PieceReader reader(tokenizer, options, std::move(files));
  std::deque<std::unique_ptr<Piece>> pieces;  // outlives the threads
  Encoders encoders(tokenizer, options);
  const size_t most_pieces = 2 * static_cast<size_t>(options.threads) + 1;
  bool ended = false;
  while (true) {
    while (!ended && pieces.size() < most_pieces) {
      ZS_ASSIGN_OR_RETURN(std::unique_ptr<Piece> piece, reader.Next());
      ended = piece == nullptr;
      if (ended) break;
      pieces.push_back(std::move(piece));
      encoders.Add(pieces.back().get());
    }
    if (pieces.empty()) break;
    encoders.Wait(*pieces.front());
    ZS_RETURN_IF_ERROR(pieces.front()->status);
    ZS_RETURN_IF_ERROR(writer.Append(pieces.front()->ids));
    so_far.documents += pieces.front()->documents;
    so_far.tokens = writer.tokens();
    so_far.bytes = reader.bytes_read();
    pieces.pop_front();
    progress(so_far);
  }
  if (so_far.tokens == 0) {
    return absl::InvalidArgumentError("there is no text in what was named: nothing was written");
  }
  ZS_RETURN_IF_ERROR(writer.Finish());
  return so_far;
}

}  // namespace zeroshard
