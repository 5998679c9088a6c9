// Replays a captured list of op calls without Python; ingot/ops/replay.py writes the list.
//
//   call OP OVERLOAD ARGUMENTS TYPE VALUE ... OUTPUTS REGISTER ...
//   view BASE DIMENSIONS SIZE ... STRIDE ... OFFSET REGISTER
//   free REGISTERS REGISTER ...
//   give REGISTER
//
// Registers hold tensors: first the constants, then the outputs of the steps.
#include <map>
#include <memory>
#include <mutex>
#include <sstream>

#include "matmul.h"

namespace ingot {

struct Argument {
  char type;  // t tensor, i int, f float, b bool; upper case if optional; n for none
  int64_t number = 0;
  double value = 0;
};

// Ops that read the weights of a layer.
inline bool is_linear(const std::string& op) {
  return op.starts_with("ingot::linear") || op == "ingot::gated_linear";
}

struct Step {
  std::string op, overload;  // empty for a view
  std::vector<Argument> arguments;
  int64_t base = 0, offset = 0;  // of a view
  std::vector<int64_t> sizes, strides;
  std::vector<int64_t> outputs, freed;
  std::array<PrefetchHint, 2> next;  // weights that are read next

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
      else check(false, "unknown step");
    }
    for (const Step& step : steps_)
      for (int64_t reg : step.outputs) registers_ = std::max(registers_, reg + 1);
    validate();
    assign_prefetch_hints();
  }

  Tensor run() const {
    Registers registers(constants_);
    registers.resize(registers_);
    for (const Step& step : steps_) {
      if (step.is_view()) registers[step.outputs[0]] = make_view(*registers[step.base], step);
      else run(step, registers, thread_pool);
      for (int64_t reg : step.freed) registers[reg].reset();
    }
    return *registers[result_];
  }

 private:
  using Registers = std::vector<std::optional<Tensor>>;
  static constexpr int64_t MAX_COUNT = 1 << 16;  // bound of every count in a program

  static std::vector<int64_t> numbers(std::istream& from, int64_t count) {
    check(from && count >= 0 && count < MAX_COUNT, "a count is malformed or out of range");
    std::vector<int64_t> result(count);
    for (int64_t& number : result) from >> number;
    return result;
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
    check(from && count >= 0 && count < MAX_COUNT,
          "the number of arguments is malformed or out of range");
    if (step.overload == "-") step.overload.clear();
    step.arguments.resize(count);
    for (Argument& argument : step.arguments) {
      from >> argument.type;
      if (argument.type == 'f' || argument.type == 'F') from >> argument.value;
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
    check(bool(from), "incomplete view");
    return step;
  }

  // Every register is defined before it is used, and not used after it is freed.
  void validate() const {
    check(registers_ < MAX_COUNT, "too many registers");
    std::vector<bool> defined(registers_, false);
    std::fill_n(defined.begin(), constants_.size(), true);
    auto use = [&](int64_t reg) {
      check(reg >= 0 && reg < registers_ && defined[reg],
            "a register is used before it is defined or after it is freed");
    };
    for (const Step& step : steps_) {
      if (step.is_view()) use(step.base);
      for (const Argument& argument : step.arguments)
        if (argument.type == 't' || argument.type == 'T') use(argument.number);
      for (int64_t reg : step.outputs)
        check(reg >= 0, "a register number is negative"), defined[reg] = true;
      for (int64_t reg : step.freed) use(reg), defined[reg] = false;
    }
    use(result_);
  }

  // The last weights are followed by the first ones, of the next token.
  void assign_prefetch_hints() {
    std::array<PrefetchHint, 2> next;
    for (int pass = 0; pass < 2; pass++)
      for (auto step = steps_.rbegin(); step != steps_.rend(); step++) {
        step->next = next;
        if (is_linear(step->op)) next = weight_hints(*step);
      }
  }

  std::array<PrefetchHint, 2> weight_hints(const Step& step) const {
    std::array<PrefetchHint, 2> result;
    size_t count = 0;
    for (const Argument& argument : step.arguments) {
      if (argument.type != 't' || argument.number >= int64_t(constants_.size())) continue;
      const Tensor& weight = *constants_[argument.number];
      if (weight.dim() != 2 || weight.size(0) == 0 || count == result.size()) continue;
      std::vector<ColumnRange> groups = balanced_columns(weight.size(0));
      int64_t row = weight.stride(0) * weight.element_size();
      result[count++] = {(const char*)weight.data_ptr(), groups[0].count * row,
          int64_t(groups.size())};
    }
    return result;
  }

  static Tensor make_view(const Tensor& base, const Step& step) {
    AtenTensorHandle handle;
    check_torch(aoti_torch__reinterpret_tensor(base.get(), step.sizes.size(), step.sizes.data(),
                                               step.strides.data(), step.offset, &handle));
    return Tensor(handle);
  }

  static StableIValue value(const Argument& argument, const Registers& registers) {
    switch (argument.type) {
      case 't': return box(*registers[argument.number]);
      case 'T': return box(registers[argument.number]);
      case 'i': return box(argument.number);
      case 'I': return box_pointer(box(argument.number));
      case 'f': return box(argument.value);
      case 'F': return box_pointer(box(argument.value));
      case 'b': return box(bool(argument.number));
      default: return 0;
    }
  }

  static void run(const Step& step, Registers& registers, ThreadPool* thread_pool) {
    for (size_t i = 0; thread_pool && i < step.next.size(); i++)
      thread_pool->hint_next(i, step.next[i]);
    std::vector<StableIValue> stack(std::max(step.arguments.size(), step.outputs.size()));
    for (size_t i = 0; i < step.arguments.size(); i++)
      stack[i] = value(step.arguments[i], registers);
    call_op(step.op.c_str(), step.overload.c_str(), stack.data());
    for (size_t i = 0; i < step.outputs.size(); i++)
      registers[step.outputs[i]] = unbox<Tensor>(stack[i]);
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
    auto result = programs.find(number);
    check(result != programs.end(), "unknown program");
    program = result->second;
  }
  return program->run();
}

bool drop(int64_t number) {
  std::lock_guard guard(programs_lock);
  return programs.erase(number);
}

}  // namespace ingot

static const ingot::Registration define("ingot_replay", {
    "make(str text, Tensor[] constants) -> int",
    "run(int program) -> Tensor",
    "drop(int program) -> bool",
});
static const ingot::Registration implement("ingot_replay", "CompositeExplicitAutograd", {
    {"make", ingot::boxed_kernel<&ingot::make>},
    {"run", ingot::boxed_kernel<&ingot::run>},
    {"drop", ingot::boxed_kernel<&ingot::drop>},
});
