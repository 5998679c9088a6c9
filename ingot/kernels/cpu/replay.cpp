// Runs a recorded list of op calls without Python: see ingot/ops/replay.py, which writes the list.
//
//   call OP OVERLOAD ARGUMENTS KIND VALUE ... OUTPUTS REGISTER ...
//   view BASE DIMENSIONS SIZE ... STRIDE ... OFFSET REGISTER
//   free REGISTERS REGISTER ...
//   give REGISTER
//
// Registers hold tensors. The first ones are the constants, the others what the steps make.
#include <map>
#include <memory>
#include <mutex>
#include <sstream>

#include "matmul.h"

namespace ingot {

struct Argument {
  char kind;  // t tensor, i int, f float, b bool; in capitals where it is optional; n for none
  int64_t number = 0;
  double value = 0;
};

struct Step {
  std::string op, overload;  // of a call
  std::vector<Argument> arguments;
  int64_t base = 0, offset = 0;  // of a view: from where its base begins
  std::vector<int64_t> sizes, strides;
  std::vector<int64_t> outputs, freed;
  std::array<Expected, 2> next;  // of a call: the weights that are read after it

  bool is_view() const { return op.empty(); }
};

class Program {
 public:
  Program(const std::string& text, const std::vector<Tensor>& constants)
      : constants_(constants.begin(), constants.end()), registers_(constants.size()) {
    std::istringstream lines(text);
    for (std::string word; lines >> word;) {
      if (word == "call") steps_.push_back(call(lines));
      else if (word == "view") steps_.push_back(view(lines));
      else if (word == "free" && !steps_.empty()) steps_.back().freed = numbers(lines);
      else if (word == "give") lines >> result_;
      else need(false, "a known step");
    }
    for (const Step& step : steps_)
      for (int64_t reg : step.outputs) registers_ = std::max(registers_, reg + 1);
    check();
    look_ahead();
  }

  Tensor run() const {
    Registers registers(constants_);
    registers.resize(registers_);
    for (const Step& step : steps_) {
      if (step.is_view()) registers[step.outputs[0]] = viewed(*registers[step.base], step);
      else run(step, registers, pool);
      for (int64_t reg : step.freed) registers[reg].reset();
    }
    return *registers[result_];
  }

 private:
  using Registers = std::vector<std::optional<Tensor>>;
  static constexpr int64_t MOST = 1 << 16;  // of anything that is counted here

  static std::vector<int64_t> numbers(std::istream& from, int64_t count) {
    need(from && count >= 0 && count < MOST, "a sensible number of numbers");
    std::vector<int64_t> found(count);
    for (int64_t& number : found) from >> number;
    return found;
  }
  static std::vector<int64_t> numbers(std::istream& from) {
    int64_t count = -1;
    from >> count;
    return numbers(from, count);
  }
  static Step call(std::istream& from) {
    Step step;
    int64_t count = -1;
    from >> step.op >> step.overload >> count;
    need(from && count >= 0 && count < MOST, "a sensible number of arguments");
    if (step.overload == "-") step.overload.clear();
    step.arguments.resize(count);
    for (Argument& argument : step.arguments) {
      from >> argument.kind;
      if (argument.kind == 'f' || argument.kind == 'F') from >> argument.value;
      else from >> argument.number;
    }
    step.outputs = numbers(from);
    return step;
  }
  static Step view(std::istream& from) {
    Step step;
    int64_t dims = -1;
    from >> step.base >> dims;
    step.sizes = numbers(from, dims), step.strides = numbers(from, dims);
    from >> step.offset;
    step.outputs = numbers(from, 1);
    need(bool(from), "a whole view");
    return step;
  }

  // Every register is made before it is used, and not used once it is freed.
  void check() const {
    need(registers_ < MOST, "a sensible number of registers");
    std::vector<bool> there(registers_, false);
    std::fill_n(there.begin(), constants_.size(), true);
    auto use = [&](int64_t reg) {
      need(reg >= 0 && reg < registers_ && there[reg], "registers that were made");
    };
    for (const Step& step : steps_) {
      if (step.is_view()) use(step.base);
      for (const Argument& argument : step.arguments)
        if (argument.kind == 't' || argument.kind == 'T') use(argument.number);
      for (int64_t reg : step.outputs) need(reg >= 0, "registers"), there[reg] = true;
      for (int64_t reg : step.freed) use(reg), there[reg] = false;
    }
    use(result_);
  }

  // Behind the last weights come the first ones again: the next token's.
  void look_ahead() {
    std::array<Expected, 2> next;
    for (int turn = 0; turn < 2; turn++)
      for (auto step = steps_.rbegin(); step != steps_.rend(); step++) {
        step->next = next;
        if (step->op.starts_with("ingot::linear")) next = weights(*step);
      }
  }

  std::array<Expected, 2> weights(const Step& step) const {
    std::array<Expected, 2> found;
    size_t count = 0;
    for (const Argument& argument : step.arguments) {
      if (argument.kind != 't' || argument.number >= int64_t(constants_.size())) continue;
      const Tensor& weight = *constants_[argument.number];
      if (weight.dim() != 2 || weight.size(0) == 0 || count == found.size()) continue;
      std::vector<Columns> groups = even_columns(weight.size(0));
      int64_t row = weight.stride(0) * weight.element_size();
      found[count++] = {(const char*)weight.data_ptr(), groups[0].count * row, int64_t(groups.size())};
    }
    return found;
  }

  static Tensor viewed(const Tensor& base, const Step& step) {
    AtenTensorHandle handle;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(
        base.get(), step.sizes.size(), step.sizes.data(), step.strides.data(), step.offset, &handle));
    return Tensor(handle);
  }

  static StableIValue value(const Argument& argument, const Registers& registers) {
    using torch::stable::detail::from;
    switch (argument.kind) {
      case 't': return from(*registers[argument.number]);
      case 'T': return from(registers[argument.number]);
      case 'i': return from(argument.number);
      case 'I': return from(std::optional<int64_t>(argument.number));
      case 'f': return from(argument.value);
      case 'F': return from(std::optional<double>(argument.value));
      case 'b': return from(bool(argument.number));
      default: return from(std::nullopt);
    }
  }

  static void run(const Step& step, Registers& registers, Pool* pool) {
    for (size_t i = 0; pool && i < step.next.size(); i++) pool->expect(i, step.next[i]);
    std::vector<StableIValue> stack(std::max(step.arguments.size(), step.outputs.size()));
    for (size_t i = 0; i < step.arguments.size(); i++) stack[i] = value(step.arguments[i], registers);
    STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(step.op.c_str(), step.overload.c_str(),
                                                        stack.data(), TORCH_ABI_VERSION));
    for (size_t i = 0; i < step.outputs.size(); i++)
      registers[step.outputs[i]] = taken<Tensor>(stack.data(), i);
  }

  Registers constants_;
  std::vector<Step> steps_;
  int64_t registers_, result_ = -1;
};

std::mutex programs_lock;
std::map<int64_t, std::shared_ptr<const Program>> programs;

int64_t make(const std::string& text, const std::vector<Tensor>& constants) {
  auto program = std::make_shared<const Program>(text, constants);
  std::lock_guard guard(programs_lock);
  int64_t number = programs.empty() ? 0 : programs.rbegin()->first + 1;
  programs[number] = std::move(program);
  return number;
}

Tensor run(int64_t number) {
  std::shared_ptr<const Program> program;
  {
    std::lock_guard guard(programs_lock);
    auto found = programs.find(number);
    need(found != programs.end(), "a program that was made");
    program = found->second;
  }
  return program->run();
}

bool drop(int64_t number) {
  std::lock_guard guard(programs_lock);
  return programs.erase(number);
}

}  // namespace ingot

STABLE_TORCH_LIBRARY(ingot_replay, m) {
  m.def("make(str text, Tensor[] constants) -> int");
  m.def("run(int program) -> Tensor");
  m.def("drop(int program) -> bool");
}
STABLE_TORCH_LIBRARY_IMPL(ingot_replay, CompositeExplicitAutograd, m) {
  m.impl("make", TORCH_BOX(&ingot::make));
  m.impl("run", TORCH_BOX(&ingot::run));
  m.impl("drop", TORCH_BOX(&ingot::drop));
}
