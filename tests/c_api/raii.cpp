// SPDX-License-Identifier: MIT OR Apache-2.0
// What the C++ helpers promise, each function one promise; 0 when it is kept, else the line that found it broken.
#include <gpu_runtime.h>

#include <cstring>
#include <thread>
#include <vector>

#define EXPECT(condition) \
    if (!(condition))     \
        return __LINE__

namespace {

// Runs with no GIL, and turns what is thrown into a line's number that no source has.
template <typename Body> int without_gil(Body body)
{
    gpurt::gil_release released;
    try {
        return body();
    } catch (const gpurt::error &error) {
        return 1000000 + error.code();
    }
}

} // namespace

extern "C" {

int prepare() { return gpurt_import(); }

// Blocks, streams and events are given back at the end of their scope, moved ones once.
int resources(PyObject *object)
{
    gpurt::backend gpu(object);
    return without_gil([&] {
        gpurt::buffer first(gpu, 64, "first");
        gpurt::buffer second(gpu, 64);
        const std::vector<unsigned char> sent(64, 7);
        std::vector<unsigned char> got(64);
        first.write(sent.data(), 64);
        gpurt::stream stream(gpu);
        gpurt::event written(gpu), copied(gpu, true);
        written.record();
        written.before(stream.handle());
        gpurt::check(gpurt_copy_d2d_async(gpu.handle(), first.ptr(), second.ptr(), 64, stream.handle()));
        copied.record(stream.handle());
        copied.synchronize();
        EXPECT(copied.done() && written.done());
        second.read(got.data(), 63, 1);
        EXPECT(std::memcmp(sent.data(), got.data(), 63) == 0);
        gpurt::buffer third(std::move(first));
        EXPECT(first.ptr() == 0 && third.ptr() != 0 && third.nbytes() == 64);
        second = std::move(third);
        gpurt::stream other(std::move(stream));
        gpurt::event last(std::move(copied));
        last.synchronize();
        other.synchronize();
        gpu.synchronize();
        return 0;
    });
}

// A failed call throws its code and its message, and leaves nothing behind.
int failure(PyObject *object)
{
    gpurt::backend gpu(object);
    return without_gil([&] {
        try {
            gpurt::buffer nothing(gpu, 0);
        } catch (const gpurt::error &error) {
            EXPECT(error.code() == GPURT_ERROR_VALUE);
            EXPECT(std::string(error.what()).find("alloc: nbytes") != std::string::npos);
            return 0;
        }
        return __LINE__;
    });
}

// A thrown error becomes the Python exception that it stands for, with its text.
PyObject *raises(PyObject *object)
{
    try {
        gpurt::backend gpu(object);
        gpurt::buffer huge(gpu, UINT64_C(1) << 62);
    } catch (const gpurt::error &error) {
        return error.raise();
    }
    Py_RETURN_NONE;
}

// References are counted: copied, moved, lent, and dropped on a thread without the GIL.
int references(PyObject *object)
{
    const Py_ssize_t before = Py_REFCNT(object);
    gpurt::ref one = gpurt::ref::borrow(object);
    {
        gpurt::ref two = one, three = std::move(two);
        EXPECT(!two && three.get() == object && Py_REFCNT(object) == before + 2);
        two = three;
        EXPECT(Py_REFCNT(object) == before + 3);
    }
    EXPECT(Py_REFCNT(object) == before + 1);
    {
        gpurt::gil_release released;
        std::thread([&] { gpurt::ref last = std::move(one); }).join();
        std::thread([] {
            gpurt::gil_acquire gil, again;
            gpurt::ref number = gpurt::ref::steal(PyLong_FromLong(123456));
        }).join();
    }
    EXPECT(!one && Py_REFCNT(object) == before);
    try {
        gpurt::ref::borrow(object).attribute("no such thing");
    } catch (const gpurt::error &error) {
        EXPECT(error.code() == GPURT_ERROR_RUNTIME && std::strstr(error.what(), "AttributeError"));
        EXPECT(!PyErr_Occurred() && Py_REFCNT(object) == before);
        return 0;
    }
    return __LINE__;
}
}
