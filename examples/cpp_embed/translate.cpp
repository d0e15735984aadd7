// SPDX-License-Identifier: MIT OR Apache-2.0
//
// A C++ program that embeds Python, opens metrale's engine, and translates the lines of a file with it from several
// native threads. The translations are printed in the order of the lines.
//
//     translate --python PYTHON [--device D] [--dtype T] [--model M] [--from L] [--to L] [--threads N]
//               [--leave-open | --bare] FILE
//
// PYTHON is the interpreter of the environment that metrale is installed in. --leave-open ends the program without
// closing engine and model, which must do no harm. --bare only starts Python and multiplies with NumPy: what memory
// checkers find in that is not ours.
#include <gpu_runtime.h>

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

struct options {
    std::string python, device = "auto", dtype = "auto", model, from = "eng_Latn", to = "fra_Latn", file;
    int threads = 4;
    bool leave_open = false, bare = false;
};

struct usage_error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

options parse(int argc, char **argv)
{
    options found;
    for (int i = 1; i < argc; ++i) {
        const std::string name = argv[i];
        const auto value = [&] {
            if (++i == argc)
                throw usage_error("expected a value after " + name);
            return std::string(argv[i]);
        };
        if (name == "--python")
            found.python = value();
        else if (name == "--device")
            found.device = value();
        else if (name == "--dtype")
            found.dtype = value();
        else if (name == "--model")
            found.model = value();
        else if (name == "--from")
            found.from = value();
        else if (name == "--to")
            found.to = value();
        else if (name == "--threads")
            found.threads = std::atoi(value().c_str());
        else if (name == "--leave-open")
            found.leave_open = true;
        else if (name == "--bare")
            found.bare = true;
        else if (name.rfind("--", 0) != 0 && found.file.empty())
            found.file = name;
        else
            throw usage_error("unexpected argument " + name);
    }
    if (found.python.empty() || found.threads < 1 || (found.file.empty() && !found.bare))
        throw usage_error("usage: translate --python PYTHON [--threads N] ... FILE");
    return found;
}

// Python while it lives, in the environment of the given interpreter. The thread that makes it holds the GIL.
class interpreter {
  public:
    explicit interpreter(const std::string &python)
    {
        PyConfig config;
        PyConfig_InitPythonConfig(&config);
        config.parse_argv = 0;
        PyStatus status = PyConfig_SetBytesString(&config, &config.program_name, python.c_str());
        if (!PyStatus_Exception(status))
            status = Py_InitializeFromConfig(&config);
        PyConfig_Clear(&config);
        if (PyStatus_Exception(status))
            throw std::runtime_error(std::string("Python did not start: ") + status.err_msg);
    }
    // End Python; 0 when that went well. Everything may still be destroyed after it.
    int end() { return std::exchange(ended_, true) ? 0 : Py_FinalizeEx(); }
    ~interpreter() { end(); }
    interpreter(const interpreter &) = delete;
    interpreter &operator=(const interpreter &) = delete;

  private:
    bool ended_ = false;
};

gpurt::ref import(const char *name) { return gpurt::ref::steal(PyImport_ImportModule(name)); }

// Call an attribute with arguments in the format of Py_BuildValue, in parentheses.
template <typename... Arguments>
gpurt::ref call(const gpurt::ref &object, const char *name, const char *format, Arguments... arguments)
{
    const gpurt::ref function = object.attribute(name);
    const gpurt::ref given = gpurt::ref::steal(Py_BuildValue(format, arguments...));
    return gpurt::ref::steal(PyObject_CallObject(function.get(), given.get()));
}

std::string text_of(const gpurt::ref &text)
{
    Py_ssize_t size = 0;
    const char *bytes = PyUnicode_AsUTF8AndSize(text.get(), &size);
    if (!bytes)
        gpurt::check_python();
    return std::string(bytes, static_cast<size_t>(size));
}

// An engine with its model. Made, used and destroyed with the GIL.
class translator {
  public:
    explicit translator(const options &given)
    {
        const gpurt::ref metrale = import("metrale");
        const gpurt::ref path = given.model.empty() ? call(metrale, "demo_model_path", "()")
                                                    : gpurt::ref::steal(PyUnicode_FromString(given.model.c_str()));
        const gpurt::ref load = metrale.attribute("load");
        const gpurt::ref arguments = gpurt::ref::steal(Py_BuildValue("(Oss)", path.get(), given.device.c_str(), given.dtype.c_str()));
        const gpurt::ref limits = gpurt::ref::steal(Py_BuildValue("{s:i,s:i,s:i,s:s,s:s}", "max_batch", 8,
                                                                  "max_source_len", 128, "max_new_tokens", 128, "source",
                                                                  given.from.c_str(), "target", given.to.c_str()));
        model_ = gpurt::ref::steal(PyObject_Call(load.get(), arguments.get(), limits.get()));
        const gpurt::ref module = import("metrale.engine");
        request_ = module.attribute("Request");
        engine_ = call(module, "Engine", "(O)", model_.get());
        tokenizer_ = model_.attribute("tokenizer");
    }
    const gpurt::ref &model() const { return model_; }

    // Translate one line. Waiting for the result gives up the GIL, so the other threads' requests join the same batch.
    std::string translate(const std::string &line) const
    {
        const gpurt::ref ids = call(tokenizer_, "encode", "(s)", line.c_str());
        const gpurt::ref request = gpurt::ref::steal(PyObject_CallFunctionObjArgs(request_.get(), ids.get(), nullptr));
        const gpurt::ref handle = call(engine_, "submit", "(O)", request.get());
        const gpurt::ref result = call(call(handle, "result", "()"), "raise_for_error", "()");
        const gpurt::ref chosen = result.attribute("ids");
        return text_of(call(tokenizer_, "decode", "(O)", chosen.get()));
    }
    void close()
    {
        call(engine_, "close", "()");
        call(model_, "close", "()");
    }

  private:
    gpurt::ref model_, engine_, request_, tokenizer_;
};

std::vector<std::string> lines_of(const std::string &file)
{
    std::ifstream input(file);
    if (!input)
        throw usage_error("cannot read " + file);
    std::vector<std::string> lines;
    for (std::string line; std::getline(input, line);)
        lines.push_back(line);
    return lines;
}

// Translate all lines on native threads, which Python did not make. The caller gives up the GIL meanwhile.
std::vector<std::string> translate_all(const translator &from, const std::vector<std::string> &lines, int count)
{
    std::vector<std::string> translations(lines.size()), failures(lines.size());
    std::atomic<size_t> next{0};
    std::vector<std::thread> threads;
    const gpurt::gil_release released;
    for (int i = 0; i < count; ++i)
        threads.emplace_back([&] {
            for (size_t line; (line = next++) < lines.size();)
                try {
                    const gpurt::gil_acquire gil;
                    translations[line] = from.translate(lines[line]);
                } catch (const gpurt::error &error) {
                    failures[line] = error.what();
                }
        });
    for (std::thread &thread : threads)
        thread.join();
    for (size_t line = 0; line < lines.size(); ++line)
        if (!failures[line].empty())
            throw std::runtime_error("line " + std::to_string(line + 1) + ": " + failures[line]);
    return translations;
}

// What the program embeds besides, for comparison: NumPy, and nothing of metrale.
void multiply()
{
    const gpurt::ref numpy = import("numpy");
    const gpurt::ref ones = call(numpy, "ones", "((ii))", 8, 8);
    const gpurt::ref sum = call(call(ones, "dot", "(O)", ones.get()), "sum", "()");
    std::cout << text_of(gpurt::ref::steal(PyObject_Str(sum.get()))) << "\n";
}

int run(const options &given)
{
    const std::vector<std::string> lines = given.bare ? std::vector<std::string>() : lines_of(given.file);
    interpreter python(given.python);
    if (given.bare) {
        multiply();
        return python.end();
    }
    gpurt::check(gpurt_import());
    {
        translator engine(given);
        {
            const gpurt::backend gpu(engine.model().get());
            const gpurt::buffer scratch(gpu, 1024, "a block of the host program's own");
            for (const std::string &line : translate_all(engine, lines, given.threads))
                std::cout << line << "\n";
            if (given.leave_open)
                return python.end(); // what is destroyed after this finds no interpreter, and leaves it at that
        }
        engine.close();
    }
    return python.end();
}

} // namespace

int main(int argc, char **argv)
{
    try {
        return run(parse(argc, argv));
    } catch (const usage_error &error) {
        std::cerr << "translate: " << error.what() << "\n";
        return 2;
    } catch (const std::exception &error) {
        std::cerr << "translate: " << error.what() << "\n";
        return 1;
    }
}
