import glob, importlib, importlib.util, os, sys
import torch
def import_ortmodule():
    if "done" in globals(): return globals()["done"]
    base = "torch.onnx._internal.torchscript_exporter"
    import torch.onnx
    for parent, ns in {"torch.onnx._internal": ["jit_utils", "registration", "onnx_proto_utils"], "torch.onnx": ["_globals", "_type_utils", *(f"symbolic_opset{n}" for n in range(7, 21))]}.items():
        for n in ns:
            try: m = importlib.import_module(f"{base}.{n}")
            except ImportError: continue
            sys.modules[f"{parent}.{n}"] = m
            setattr(sys.modules[parent], n, m)
    export = torch.onnx.export
    def _export(*a, **k):
        k.setdefault("dynamo", False)
        return export(*a, **k)
    import inspect
    _export.__signature__ = inspect.signature(export)
    torch.onnx.export = _export
    import onnxruntime.training.utils.torch_profile_utils as tpu
    if not hasattr(torch._C, "_nvtx"):
        tpu.torch_nvtx_range_push = lambda m: None
        tpu.torch_nvtx_range_pop = lambda: None
    import onnxruntime.training.ortmodule as om
    import onnxruntime.training.ortmodule.torch_cpp_extensions as package
    folder = os.path.dirname(sorted(glob.glob(os.path.expanduser(f"~/.cache/ort_zero/extensions/*torch{torch.__version__}*/aten_op_executor*.so")))[-1])
    for name in ("aten_op_executor", "torch_interop_utils"):
        path = glob.glob(f"{folder}/{name}*.so")[0]
        spec = importlib.util.spec_from_file_location(name, path)
        m = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(m)
        setattr(package, name, m)
        sys.modules[f"{package.__name__}.{name}"] = m
    om._FALLBACK_INIT_EXCEPTION = None
    globals()["done"] = om
    return om
def make_ortmodule(module, options=None):
    from onnxruntime.training.ortmodule import ORTModule
    return ORTModule(module, options)
