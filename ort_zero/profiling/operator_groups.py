"""Group the operators of ONNX Runtime and of PyTorch by their work: a group is one row of the comparison."""

from __future__ import annotations

import functools

OTHER = "other operators"
_GROUPS: dict[str, str] = {
    "matrix products": "Gemm MatMul FusedMatMul TransposeMatMul FusedGemm "
    "aten::mm aten::addmm aten::bmm aten::baddbmm aten::matmul aten::linear aten::tensordot aten::addmv aten::mv "
    "aten::dot mkldnn::_linear_pointwise mkl::_mkl_linear aten::mkldnn_linear",
    "attention": "Attention MultiHeadAttention aten::scaled_dot_product_attention "
    "aten::_scaled_dot_product_flash_attention_for_cpu aten::_scaled_dot_product_flash_attention_for_cpu_backward "
    "aten::_scaled_dot_product_attention_math",
    "softmax": "Softmax SoftmaxGrad SoftmaxGrad_13 LogSoftmax LogSoftmaxGrad LogSoftmaxGrad_13 IsNaN aten::softmax "
    "aten::_softmax aten::_softmax_backward_data aten::_safe_softmax aten::isnan",
    "loss": "SoftmaxCrossEntropyLossInternal SoftmaxCrossEntropyLossInternalGrad aten::cross_entropy_loss "
    "aten::nll_loss aten::nll_loss_nd aten::nll_loss_forward aten::nll_loss_backward aten::log_softmax "
    "aten::_log_softmax aten::_log_softmax_backward_data aten::mse_loss aten::mse_loss_backward",
    "normalization": "LayerNormalization LayerNormalizationGrad InvertibleLayerNormalizationGrad "
    "SimplifiedLayerNormalization SimplifiedLayerNormalizationGrad SkipLayerNormalization GroupNormalization "
    "BatchNormalization BatchNormInternal BatchNormalizationGrad InstanceNormalization aten::layer_norm "
    "aten::native_layer_norm aten::native_layer_norm_backward aten::rms_norm aten::_fused_rms_norm "
    "aten::_fused_rms_norm_backward aten::group_norm aten::native_group_norm aten::native_group_norm_backward "
    "aten::batch_norm aten::native_batch_norm aten::native_batch_norm_backward aten::_batch_norm_impl_index "
    "aten::_batch_norm_with_update aten::batch_norm_backward",
    "activations": "Relu ReluGrad Gelu GeluGrad FastGelu FastGeluGrad BiasGelu BiasGeluGrad_dX BiasFastGeluGrad_dX "
    "QuickGelu QuickGeluGrad Tanh TanhGrad Sigmoid SigmoidGrad Erf Elu LeakyRelu HardSwish Softplus aten::relu "
    "aten::relu_ aten::clamp_min aten::threshold_backward aten::gelu aten::gelu_backward aten::silu aten::silu_ "
    "aten::silu_backward aten::tanh aten::tanh_backward aten::sigmoid aten::sigmoid_backward aten::hardtanh",
    "convolution": "Conv FusedConv ConvGrad ConvTranspose aten::conv1d aten::conv2d aten::conv3d aten::convolution "
    "aten::_convolution aten::mkldnn_convolution aten::convolution_backward",
    "pooling": "MaxPool MaxPoolGrad AveragePool AveragePoolGrad GlobalAveragePool GlobalMaxPool aten::max_pool2d "
    "aten::max_pool2d_with_indices aten::max_pool2d_with_indices_backward aten::avg_pool2d aten::avg_pool2d_backward "
    "aten::adaptive_avg_pool2d aten::_adaptive_avg_pool2d aten::mean",
    "embedding and gathering": "Gather GatherGrad GatherND GatherNDGrad GatherElements GatherElementsGrad "
    "ScatterElements ScatterND aten::embedding aten::embedding_backward aten::embedding_dense_backward "
    "aten::index_select aten::index aten::index_put_ aten::_index_put_impl_ aten::gather aten::scatter "
    "aten::scatter_add_ aten::index_add_",
    "dropout": "Dropout BitmaskDropout DropoutGrad BitmaskDropoutGrad BiasDropout aten::dropout aten::native_dropout "
    "aten::native_dropout_backward aten::bernoulli_ aten::bernoulli",
    "element by element": "Add Sub Mul Div Neg Pow Sqrt Rsqrt Exp Log Sin Cos Abs Sign Reciprocal Sum Min Max Clip "
    "Where And Or Not Equal Less LessOrEqual Greater GreaterOrEqual Trilu ScaledSum InPlaceAccumulatorV2 aten::add "
    "aten::add_ aten::sub aten::sub_ aten::rsub aten::mul aten::mul_ aten::div aten::div_ aten::neg aten::pow "
    "aten::sqrt aten::rsqrt aten::exp aten::log aten::sin aten::cos aten::abs aten::reciprocal aten::clamp aten::where "
    "aten::eq aten::ne aten::lt aten::le aten::gt aten::ge aten::bitwise_and aten::bitwise_or aten::bitwise_not "
    "aten::logical_and aten::logical_not aten::masked_fill aten::masked_fill_ aten::addcmul aten::addcdiv_ aten::tril "
    "aten::triu aten::lerp_ aten::minimum aten::maximum",
    "sums over axes": "ReduceSum ReduceMean ReduceSumTraining ReduceMax ReduceMin ReduceSumSquare aten::sum aten::max "
    "aten::min aten::amax aten::amin aten::var aten::cumsum CumSum ArgMax aten::argmax",
    "copies, casts and zeros": "Transpose Concat ConcatTraining Split SplitTraining Slice SliceGrad Pad Expand Tile "
    "Cast Identity ConstantOfShape ZerosLike Resize aten::copy_ aten::clone aten::contiguous aten::cat aten::stack "
    "aten::to aten::_to_copy aten::zeros aten::zeros_like aten::zero_ aten::fill_ aten::ones aten::ones_like "
    "aten::full aten::new_zeros aten::pad aten::constant_pad_nd aten::repeat aten::slice_backward "
    "aten::select_backward aten::expand_copy aten::flip aten::roll",
    "shapes and views": "Shape Reshape Squeeze Unsqueeze Flatten Size Range Constant aten::view aten::reshape "
    "aten::_reshape_alias aten::_unsafe_view aten::transpose aten::t aten::permute aten::expand aten::slice "
    "aten::select aten::as_strided aten::squeeze aten::unsqueeze aten::split aten::split_with_sizes aten::chunk "
    "aten::unbind aten::narrow aten::detach aten::detach_ detach aten::empty aten::empty_like aten::empty_strided "
    "aten::resize_ aten::set_ aten::arange aten::view_as aten::expand_as aten::flatten aten::alias aten::lift_fresh",
}
"""Names of operators by the name of their group, operators of ONNX Runtime before operators of PyTorch."""


@functools.cache
def _groups_by_operator() -> dict[str, str]:
    return {operator: group for group, operators in _GROUPS.items() for operator in operators.split()}


def group_of(operator: str) -> str:
    """Return the name of an operator's group; :data:`OTHER` for an operator without a group."""
    return _groups_by_operator().get(operator, OTHER)
