// The operator `vllm_medusa::linear` for CPUs: rows . weight^T + bias by the product of rows.h, or by torch's for numbers
// of rows at which that is quicker. Built on torch's stable interface: one library serves any torch of that interface.

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <optional>

#include "rows.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The place in `mask` of a number of rows: 1, 2, 3 to 4, 5 to 8, ..., 65 to 128, more.
int64_t place(int64_t rows) {
  int64_t at = 0;
  while (at < 8 && (int64_t{1} << at) < rows) ++at;
  return at;
}

template <class T>
void multiply(const Tensor& rows, const Tensor& weight, const std::optional<Tensor>& bias, Tensor& out, int64_t count) {
  medusa::Product<T> product{
      static_cast<const T*>(rows.data_ptr()), static_cast<const T*>(weight.data_ptr()),
      bias ? static_cast<const T*>(bias->data_ptr()) : nullptr, static_cast<T*>(out.data_ptr()),
      count, weight.size(1), weight.size(0), weight.size(1)};
  medusa::multiply(product);
}

Tensor by_torch(const Tensor& rows, const Tensor& weight, const std::optional<Tensor>& bias) {
  StableIValue stack[3] = {torch::stable::detail::from(rows), torch::stable::detail::from(weight),
                           torch::stable::detail::from(bias)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::linear", "", stack, TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// Writes to a tensor that it is handed, so that compiled graphs plan its memory: an allocation of its own for each product
// makes the allocator give pages back and fault them in again, some tens of microseconds each time.
void linear(Tensor out, const Tensor& rows, const Tensor& weight, const std::optional<Tensor>& bias, int64_t mask) {
  const int64_t dims = rows.dim(), size = weight.size(1), count = size ? rows.numel() / size : 0;
  const ScalarType type = weight.scalar_type();
  STD_TORCH_CHECK(rows.scalar_type() == type && rows.size(dims - 1) == size, "linear: rows do not fit the weight");
  STD_TORCH_CHECK(out.scalar_type() == type && out.is_contiguous() && out.numel() == count * weight.size(0),
                  "linear: no room for the result");
  if (!(mask >> place(count) & 1)) {
    torch::stable::copy_(out, by_torch(rows, weight, bias));
    return;
  }
  STD_TORCH_CHECK(weight.is_contiguous(), "linear: the weight is not dense");
  STD_TORCH_CHECK(!bias || (bias->scalar_type() == type && bias->is_contiguous()), "linear: the bias does not fit");
  const Tensor dense = rows.is_contiguous() ? rows : torch::stable::contiguous(rows);
  if (type == ScalarType::Float)
    multiply<float>(dense, weight, bias, out, count);
  else if (type == ScalarType::BFloat16)
    multiply<medusa::BFloat16>(dense, weight, bias, out, count);
#ifdef __FLT16_MAX__
  else if (type == ScalarType::Half)
    multiply<_Float16>(dense, weight, bias, out, count);
#endif
  else
    STD_TORCH_CHECK(false, "linear: no product of this number format");
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(vllm_medusa, library) {
  library.def("linear(Tensor(a!) out, Tensor rows, Tensor weight, Tensor? bias, int mask) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_medusa, CPU, library) { library.impl("linear", TORCH_BOX(&linear)); }
