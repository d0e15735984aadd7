/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * C++17: what is taken is given back. Failures are thrown as gpurt::error; destructors never throw, and do nothing once
 * the interpreter has begun to end.
 */
#ifndef GPU_RUNTIME_RAII_HPP
#define GPU_RUNTIME_RAII_HPP

#include "calls.h"
#include "objects.h"

#include <stdexcept>
#include <string>
#include <utility>

namespace gpurt {

/* A failed call. */
class error : public std::runtime_error {
  public:
    error(gpurt_code code, const std::string &message) : std::runtime_error(message), code_(code) {}
    gpurt_code code() const noexcept { return code_; }
    /* Set the Python exception that this one stands for; the caller holds the GIL. Returns NULL. */
    PyObject *raise() const { return gpurt_raise(code_, what()); }

  private:
    gpurt_code code_;
};

/* Throw when a call failed. */
inline void check(gpurt_code code)
{
    if (code != GPURT_OK)
        throw error(code, gpurt_last_error());
}

/* Throw the Python exception that is set, if any; the caller holds the GIL. */
inline void check_python() { check(gpurt_error_from_exception()); }

/* Holds the GIL while it lives. Any thread, whether it holds the GIL already or not. */
class gil_acquire {
  public:
    gil_acquire() : state_(PyGILState_Ensure()) {}
    ~gil_acquire() { PyGILState_Release(state_); }
    gil_acquire(const gil_acquire &) = delete;
    gil_acquire &operator=(const gil_acquire &) = delete;

  private:
    PyGILState_STATE state_;
};

/* Gives up the GIL, which the calling thread holds, while it lives. */
class gil_release {
  public:
    gil_release() : state_(PyEval_SaveThread()) {}
    ~gil_release() { PyEval_RestoreThread(state_); }
    gil_release(const gil_release &) = delete;
    gil_release &operator=(const gil_release &) = delete;

  private:
    PyThreadState *state_;
};

/* A reference to a Python object. Copying one needs the GIL; the last one may go on any thread, which then takes it. */
class ref {
  public:
    ref() noexcept = default;
    /* Own a new reference. Throws the Python exception that is set when it is NULL. The caller holds the GIL. */
    static ref steal(PyObject *object)
    {
        if (!object) {
            check_python();
            throw error(GPURT_ERROR_TYPE, "expected an object, got NULL");
        }
        return ref(object);
    }
    /* Own a further reference to an object that somebody else holds. */
    static ref borrow(PyObject *object)
    {
        Py_XINCREF(object);
        return steal(object);
    }
    ref(const ref &other) noexcept : object_(other.object_) { Py_XINCREF(object_); }
    ref(ref &&other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
    ref &operator=(ref other) noexcept
    {
        std::swap(object_, other.object_);
        return *this;
    }
    ~ref() { gpurt_drop_(object_); }
    PyObject *get() const noexcept { return object_; }
    PyObject *release() noexcept { return std::exchange(object_, nullptr); }
    explicit operator bool() const noexcept { return object_ != nullptr; }
    ref attribute(const char *name) const { return steal(PyObject_GetAttrString(object_, name)); }

  private:
    explicit ref(PyObject *object) noexcept : object_(object) {}
    PyObject *object_ = nullptr;
};

/* A handle of a backend. What is made of it must not outlive it. */
class backend {
  public:
    explicit backend(PyObject *object) { check(gpurt_backend_from_object(object, &handle_)); }
    ~backend()
    {
        if (handle_)
            gpurt_backend_release(handle_);
    }
    backend(backend &&other) noexcept : handle_(std::exchange(other.handle_, 0)) {}
    backend &operator=(backend &&other) noexcept
    {
        std::swap(handle_, other.handle_);
        return *this;
    }
    int64_t handle() const noexcept { return handle_; }
    bool is_host() const
    {
        int32_t kind = 0;
        check(gpurt_backend_kind(handle_, &kind));
        return kind == GPURT_KIND_HOST;
    }
    void synchronize(uint64_t stream = GPURT_STREAM_DEFAULT) const { check(gpurt_synchronize(handle_, stream)); }

  private:
    int64_t handle_ = 0;
};

/* A block of device memory. */
class buffer {
  public:
    buffer(const backend &on, uint64_t nbytes, const char *tag = "") : backend_(on.handle()), nbytes_(nbytes)
    {
        check(gpurt_alloc(backend_, nbytes, tag, &ptr_));
    }
    ~buffer()
    {
        if (ptr_)
            gpurt_free(backend_, ptr_);
    }
    buffer(buffer &&other) noexcept
        : backend_(other.backend_), nbytes_(other.nbytes_), ptr_(std::exchange(other.ptr_, 0))
    {
    }
    buffer &operator=(buffer &&other) noexcept
    {
        std::swap(backend_, other.backend_);
        std::swap(nbytes_, other.nbytes_);
        std::swap(ptr_, other.ptr_);
        return *this;
    }
    uint64_t ptr() const noexcept { return ptr_; }
    uint64_t nbytes() const noexcept { return nbytes_; }
    /* Copy from and to host memory; done on return. */
    void write(const void *src, uint64_t nbytes, uint64_t offset = 0) const
    {
        check(gpurt_copy_h2d(backend_, src, ptr_ + offset, nbytes));
    }
    void read(void *dst, uint64_t nbytes, uint64_t offset = 0) const
    {
        check(gpurt_copy_d2h(backend_, ptr_ + offset, dst, nbytes));
    }

  private:
    int64_t backend_;
    uint64_t nbytes_;
    uint64_t ptr_ = 0;
};

/* A stream of the backend's. Its end waits for its work. */
class stream {
  public:
    explicit stream(const backend &on) : backend_(on.handle()) { check(gpurt_create_stream(backend_, &handle_)); }
    ~stream()
    {
        if (handle_)
            gpurt_destroy_stream(backend_, handle_);
    }
    stream(stream &&other) noexcept : backend_(other.backend_), handle_(std::exchange(other.handle_, 0)) {}
    stream &operator=(stream &&other) noexcept
    {
        std::swap(backend_, other.backend_);
        std::swap(handle_, other.handle_);
        return *this;
    }
    uint64_t handle() const noexcept { return handle_; }
    void synchronize() const { check(gpurt_synchronize(backend_, handle_)); }

  private:
    int64_t backend_;
    uint64_t handle_ = 0;
};

/* An event. */
class event {
  public:
    explicit event(const backend &on, bool timing = false) : backend_(on.handle())
    {
        check(gpurt_create_event(backend_, timing, &handle_));
    }
    ~event()
    {
        if (handle_)
            gpurt_destroy_event(backend_, handle_);
    }
    event(event &&other) noexcept : backend_(other.backend_), handle_(std::exchange(other.handle_, 0)) {}
    event &operator=(event &&other) noexcept
    {
        std::swap(backend_, other.backend_);
        std::swap(handle_, other.handle_);
        return *this;
    }
    uint64_t handle() const noexcept { return handle_; }
    void record(uint64_t stream = GPURT_STREAM_DEFAULT) const { check(gpurt_record_event(backend_, handle_, stream)); }
    /* Let later work on a stream come after what the event stands for. */
    void before(uint64_t stream) const { check(gpurt_stream_wait_event(backend_, stream, handle_)); }
    void synchronize() const { check(gpurt_event_synchronize(backend_, handle_)); }
    bool done() const
    {
        int32_t answer = 0;
        check(gpurt_event_query(backend_, handle_, &answer));
        return answer != 0;
    }

  private:
    int64_t backend_;
    uint64_t handle_ = 0;
};

} // namespace gpurt

#endif
