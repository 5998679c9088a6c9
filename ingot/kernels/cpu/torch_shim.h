// The functions of torch's stable C ABI that the kernels call, as torch declares them in
//
//   torch/csrc/inductor/aoti_torch/c/shim.h
//   torch/csrc/stable/c/shim.h
//
// Those headers include half of the standard library, which takes longer to compile than a small
// family. A test compiles them together with this file, so that a difference is an error.
#pragma once

#include <cstddef>
#include <cstdint>

#include <torch/headeronly/version.h>

#pragma GCC visibility push(default)
extern "C" {

struct AtenTensorOpaque;
struct TorchLibraryOpaque;
struct StableListOpaque;
struct StringOpaque;
using AtenTensorHandle = AtenTensorOpaque*;
using TorchLibraryHandle = TorchLibraryOpaque*;
using StableListHandle = StableListOpaque*;
using StringHandle = StringOpaque*;
using StableIValue = uint64_t;
using AOTITorchError = int32_t;  // 0 for success

const char* torch_exception_get_what_without_backtrace();
AOTITorchError torch_get_num_threads(uint32_t* count);

int32_t aoti_torch_device_type_cpu();
int32_t aoti_torch_layout_strided();
int32_t aoti_torch_memory_format_contiguous_format();
int32_t aoti_torch_dtype_uint8();
int32_t aoti_torch_dtype_int8();
int32_t aoti_torch_dtype_int16();
int32_t aoti_torch_dtype_int32();
int32_t aoti_torch_dtype_int64();
int32_t aoti_torch_dtype_float16();
int32_t aoti_torch_dtype_float32();
int32_t aoti_torch_dtype_float64();
int32_t aoti_torch_dtype_complex32();
int32_t aoti_torch_dtype_complex64();
int32_t aoti_torch_dtype_complex128();
int32_t aoti_torch_dtype_bool();
int32_t aoti_torch_dtype_bfloat16();
size_t aoti_torch_dtype_element_size(int32_t dtype);

// Pointers to sizes, strides and data are borrowed; tensors are new references.
AOTITorchError aoti_torch_get_data_ptr(AtenTensorHandle tensor, void** data);
AOTITorchError aoti_torch_get_device_type(AtenTensorHandle tensor, int32_t* device_type);
AOTITorchError aoti_torch_get_dim(AtenTensorHandle tensor, int64_t* dim);
AOTITorchError aoti_torch_get_dtype(AtenTensorHandle tensor, int32_t* dtype);
AOTITorchError aoti_torch_get_numel(AtenTensorHandle tensor, int64_t* count);
AOTITorchError aoti_torch_get_sizes(AtenTensorHandle tensor, int64_t** sizes);
AOTITorchError aoti_torch_get_strides(AtenTensorHandle tensor, int64_t** strides);
AOTITorchError aoti_torch_is_contiguous(AtenTensorHandle tensor, bool* is_contiguous);
AOTITorchError aoti_torch_new_tensor_handle(AtenTensorHandle tensor, AtenTensorHandle* result);
AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle tensor);
AOTITorchError aoti_torch__reinterpret_tensor(AtenTensorHandle tensor, int64_t dim,
                                              const int64_t* sizes, const int64_t* strides,
                                              int64_t offset, AtenTensorHandle* result);
AOTITorchError aoti_torch_empty_strided(int64_t dim, const int64_t* sizes, const int64_t* strides,
                                        int32_t dtype, int32_t device_type, int32_t device_index,
                                        AtenTensorHandle* result);
AOTITorchError torch_from_blob(void* data, int64_t dim, const int64_t* sizes,
                               const int64_t* strides, int64_t offset, int32_t dtype,
                               int32_t device_type, int32_t device_index, AtenTensorHandle* result,
                               int32_t layout, const uint8_t* metadata, int64_t metadata_size,
                               void (*free)(void* data, void* context), void* context);

// Boxed values other than numbers and tensors.
AOTITorchError torch_new_stable_ivalue(StableIValue** result);
AOTITorchError torch_delete_stable_ivalue(StableIValue* value);
AOTITorchError torch_new_list_reserve_size(size_t size, StableListHandle* result);
AOTITorchError torch_list_size(StableListHandle list, size_t* size);
AOTITorchError torch_list_get_item(StableListHandle list, size_t index, StableIValue* element);
AOTITorchError torch_list_push_back(StableListHandle list, StableIValue element);
AOTITorchError torch_delete_list(StableListHandle list);
AOTITorchError torch_string_length(StringHandle string, size_t* length);
AOTITorchError torch_string_c_str(StringHandle string, const char** data);
AOTITorchError torch_delete_string(StringHandle string);

// `version` is TORCH_ABI_VERSION.
AOTITorchError torch_call_dispatcher(const char* op, const char* overload, StableIValue* stack,
                                     uint64_t version);
AOTITorchError aoti_torch_library_init_def(const char* name_space, const char* file, uint32_t line,
                                           TorchLibraryHandle* result);
AOTITorchError aoti_torch_library_init_impl(const char* name_space, const char* key,
                                            const char* file, uint32_t line,
                                            TorchLibraryHandle* result);
AOTITorchError aoti_torch_library_def(TorchLibraryHandle library, const char* schema);
AOTITorchError torch_library_impl(TorchLibraryHandle library, const char* name,
                                  void (*kernel)(StableIValue*, uint64_t, uint64_t),
                                  uint64_t version);
AOTITorchError aoti_torch_delete_library_object(TorchLibraryHandle library);

}  // extern "C"
#pragma GCC visibility pop
