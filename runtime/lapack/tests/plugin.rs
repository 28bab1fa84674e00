//! The targets, called by tiny programs on a real CPU plugin.
//!
//! Plugin and library come from the Python environment of `WAYSTATION_TEST_PYTHON`, or else of `.venv` at the top of the
//! repository.

use prost::Message;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use waystation_lapack::{Error, register};
use waystation_pjrt::ffi::Complex;
use waystation_pjrt::{
    AlignedBytes, Buffer, Client, Code, ElementType, ExecuteOptions, HostBytes, OptionValue,
    Plugin, discover, ffi,
};
use waystation_proto::xla;

fn python() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    match std::env::var_os("WAYSTATION_TEST_PYTHON") {
        Some(python) => root.join(python),
        None => root.join(".venv/bin/python"),
    }
}

fn library() -> PathBuf {
    discover::lapack(Some(&python())).expect("scipy-openblas32 is in the test environment")
}

/// One client with every target.
fn client() -> &'static Client {
    static CLIENT: OnceLock<Client> = OnceLock::new();
    CLIENT.get_or_init(|| {
        let plugin = discover::resolve("cpu", Some(&python())).expect("a CPU plugin");
        let plugin = Plugin::load(&plugin).expect("the plugin loads");
        let registered = register(&plugin, &library()).expect("it takes the targets");
        assert_eq!(registered.targets.len(), 15 * 4 + 2, "{registered:?}");
        assert!(registered.library.contains("OpenBLAS"), "{registered:?}");
        // Again is no error.
        assert_eq!(register(&plugin, &library()).expect("again"), registered);
        let options = [("cpu_device_count".to_owned(), OptionValue::Int64(1))];
        Client::create(&plugin, &options).expect("a client")
    })
}

fn options() -> Vec<u8> {
    xla::CompileOptionsProto {
        executable_build_options: Some(xla::ExecutableBuildOptionsProto {
            device_ordinal: -1,
            num_replicas: 1,
            num_partitions: 1,
            ..Default::default()
        }),
        ..Default::default()
    }
    .encode_to_vec()
}

/// An operand or a result of a call.
#[derive(Clone, Copy)]
struct Array<'a> {
    /// As in StableHLO: `2x2xf32`.
    ty: &'a str,
}

fn a(ty: &str) -> Array<'_> {
    Array { ty }
}

/// A module whose main function calls `target`. Matrices are column by column, as JAX asks for.
fn module(target: &str, attributes: &str, operands: &[Array<'_>], results: &[Array<'_>]) -> String {
    let tensor = |array: &Array<'_>| format!("tensor<{}>", array.ty);
    let layout = |array: &Array<'_>| {
        let rank = array
            .ty
            .split('x')
            .filter(|part| part.parse::<usize>().is_ok())
            .count();
        let mut order: Vec<_> = (0..rank).rev().collect();
        if let [first, second, ..] = order.as_mut_slice() {
            std::mem::swap(first, second);
        }
        let order: Vec<_> = order.iter().map(ToString::to_string).collect();
        if order.is_empty() {
            "dense<> : tensor<0xindex>".to_owned()
        } else {
            format!("dense<[{}]> : tensor<{rank}xindex>", order.join(", "))
        }
    };
    let list = |arrays: &[Array<'_>], show: &dyn Fn(&Array<'_>) -> String| {
        arrays.iter().map(show).collect::<Vec<_>>().join(", ")
    };
    let arguments: Vec<_> = (0..operands.len()).map(|i| format!("%a{i}")).collect();
    let declared: Vec<_> = operands
        .iter()
        .enumerate()
        .map(|(i, array)| format!("%a{i}: {}", tensor(array)))
        .collect();
    let returned: Vec<_> = (0..results.len()).map(|i| format!("%r#{i}")).collect();
    format!(
        "module @call {{
           func.func public @main({}) -> ({results}) {{
             %r:{} = \"stablehlo.custom_call\"({}) <{{
               call_target_name = \"{target}\", api_version = 4 : i32, has_side_effect = false,
               backend_config = {{{attributes}}},
               operand_layouts = [{}], result_layouts = [{}]
             }}> : ({}) -> ({results})
             return {} : {results}
           }}
         }}",
        declared.join(", "),
        results.len(),
        arguments.join(", "),
        list(operands, &layout),
        list(results, &layout),
        list(operands, &tensor),
        returned.join(", "),
        results = list(results, &tensor),
    )
}

trait Value: Copy + Send + Sync + 'static {
    const TYPE: ElementType;
    fn bytes(self) -> Vec<u8>;
    fn of(bytes: &[u8]) -> Self;
}

macro_rules! values {
    ($($ty:ty = $element:ident;)*) => {
        $(impl Value for $ty {
            const TYPE: ElementType = ElementType::$element;
            fn bytes(self) -> Vec<u8> {
                self.to_le_bytes().to_vec()
            }
            fn of(bytes: &[u8]) -> Self {
                Self::from_le_bytes(bytes.try_into().expect("the size"))
            }
        })*
    };
}

values! {
    f32 = F32;
    f64 = F64;
    i32 = S32;
}

impl Value for Complex<f64> {
    const TYPE: ElementType = ElementType::C128;
    fn bytes(self) -> Vec<u8> {
        [self.re.bytes(), self.im.bytes()].concat()
    }
    fn of(bytes: &[u8]) -> Self {
        Self::new(f64::of(&bytes[..8]), f64::of(&bytes[8..]))
    }
}

fn put<T: Value>(values: &[T], dims: &[i64]) -> Buffer {
    let client = client();
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.bytes()).collect();
    let bytes: HostBytes = Arc::new(bytes);
    let memory = &client.devices()[0].memories()[client.devices()[0].default_memory()];
    client
        .buffer_from_host(bytes, T::TYPE, dims, None, memory)
        .expect("a buffer")
}

fn fetch<T: Value>(buffer: &Buffer) -> Vec<T> {
    let bytes = buffer.host_bytes().expect("a size");
    let bytes = buffer
        .to_host(AlignedBytes::zeroed(bytes).expect("memory"))
        .expect("a fetch");
    let bytes = futures::executor::block_on(bytes).expect("the bytes");
    bytes.chunks_exact(size_of::<T>()).map(T::of).collect()
}

fn run(module: &str, operands: &[&Buffer]) -> Result<Vec<Buffer>, waystation_pjrt::Error> {
    let executable = client().compile(module.as_bytes(), "mlir", &options())?;
    let mut execution = executable.execute(&[operands.to_vec()], &ExecuteOptions::default())?;
    for done in execution.done.drain(..) {
        futures::executor::block_on(done)?;
    }
    Ok(execution.outputs.remove(0))
}

fn near(got: &[f64], wanted: &[f64]) {
    assert_eq!(got.len(), wanted.len());
    for (got, wanted) in got.iter().zip(wanted) {
        assert!((got - wanted).abs() < 1e-12, "{got} is not {wanted}");
    }
}

#[test]
fn cholesky_in_batches_and_in_place() {
    let calls = ffi::calls();
    let program = module(
        "lapack_dpotrf_ffi",
        "uplo = 76 : ui8",
        &[a("2x2x2xf64")],
        &[a("2x2x2xf64"), a("2xi32")],
    );
    let x = put(&[4., 2., 2., 5., -1., 0., 0., 1.], &[2, 2, 2]);
    let outputs = run(&program, &[&x]).expect("it runs");
    let l: Vec<f64> = fetch(&outputs[0]);
    // Row by row on the host. The second matrix is not positive definite.
    near(&[l[0], l[2], l[3]], &[2., 1., 2.]);
    assert_eq!(fetch::<i32>(&outputs[1]), [0, 1]);
    assert!(ffi::calls() > calls);
    let aliased = program.replace(
        "operand_layouts",
        "output_operand_aliases = [#stablehlo.output_operand_alias<output_tuple_indices = [0],
           operand_index = 0, operand_tuple_indices = []>], operand_layouts",
    );
    let outputs = run(&aliased, &[&x]).expect("it runs");
    near(&fetch::<f64>(&outputs[0])[..1], &[2.]);
    assert_eq!(fetch::<f64>(&x), [4., 2., 2., 5., -1., 0., 0., 1.]);
}

#[test]
fn triangular_solves_go_by_columns() {
    let program = module(
        "lapack_dtrsm_ffi",
        "side = 76 : ui8, uplo = 76 : ui8, trans_x = 78 : ui8, diag = 78 : ui8",
        &[a("2x2xf64"), a("2x3xf64")],
        &[a("2x3xf64")],
    );
    let x = put(&[2., 7., 1., 4.], &[2, 2]);
    let y = put(&[2., 4., 6., 5., 6., 7.], &[2, 3]);
    let outputs = run(&program, &[&x, &y]).expect("it runs");
    near(&fetch(&outputs[0]), &[1., 2., 3., 1., 1., 1.]);
}

#[test]
fn eigenvalues_of_a_rotation_are_a_pair() {
    let program = module(
        "lapack_dgeev_ffi",
        "compute_left = 78 : ui8, compute_right = 86 : ui8",
        &[a("2x2x2xf64")],
        &[
            a("2x2xf64"),
            a("2x2xf64"),
            a("2x2x2xcomplex<f64>"),
            a("2x2x2xcomplex<f64>"),
            a("2xi32"),
        ],
    );
    let program = columns_last(&program);
    let x = put(&[0., -1., 1., 0., f64::NAN, 0., 0., 1.], &[2, 2, 2]);
    let outputs = run(&program, &[&x]).expect("it runs");
    near(&fetch::<f64>(&outputs[0])[..2], &[0., 0.]);
    near(&fetch::<f64>(&outputs[1])[..2], &[1., -1.]);
    let v: Vec<Complex<f64>> = fetch(&outputs[3]);
    // Columns are vectors, and each other's conjugates.
    assert_eq!(v[0], v[1].conj());
    assert_eq!(v[2], v[3].conj());
    let i = Complex::new(0., 1.);
    assert!((-v[2] - i * v[0]).norm() < 1e-12, "{v:?}");
    assert_eq!(fetch::<i32>(&outputs[4]), [0, -4], "NaN is refused");
}

/// A stack of vectors is row by row, unlike a matrix.
fn columns_last(program: &str) -> String {
    let (head, tail) = program.split_once("result_layouts = [").expect("layouts");
    let tail = tail.replacen(
        "dense<[0, 1]> : tensor<2xindex>",
        "dense<[1, 0]> : tensor<2xindex>",
        2,
    );
    format!("{head}result_layouts = [{tail}")
}

#[test]
fn singular_values_without_vectors() {
    let program = module(
        "lapack_zgesdd_ffi",
        "mode = 78 : ui8",
        &[a("3x2xcomplex<f64>")],
        &[
            a("3x2xcomplex<f64>"),
            a("2xf64"),
            a("3x2xcomplex<f64>"),
            a("2x2xcomplex<f64>"),
            a("i32"),
        ],
    );
    let zero = Complex::new(0., 0.);
    let x = [
        Complex::new(0., 3.),
        zero,
        zero,
        Complex::new(-2., 0.),
        zero,
        zero,
    ];
    let outputs = run(&program, &[&put(&x, &[3, 2])]).expect("it runs");
    near(&fetch(&outputs[1]), &[3., 2.]);
    assert_eq!(fetch::<i32>(&outputs[4]), [0]);
    // The results for the vectors have room for all or for the least.
    for (u, vt) in [
        ("1x1xf64", "1x1xf64"),
        ("1x1xf64", "2x2xf64"),
        ("1x1xf64", "1x2xf64"),
    ] {
        let results = [a("1x2xf64"), a("1xf64"), a(u), a(vt), a("i32")];
        let program = module(
            "lapack_dgesvd_ffi",
            "mode = 78 : ui8",
            &[a("1x2xf64")],
            &results,
        );
        let outputs = run(&program, &[&put(&[3., 4.], &[1, 2])]);
        if vt == "1x1xf64" {
            let error = outputs.expect_err("no shape of right vectors");
            assert!(error.message().contains("result 3 is f64[1,1]"), "{error}");
        } else {
            near(&fetch(&outputs.expect("it runs")[1]), &[5.]);
        }
    }
}

#[test]
fn sparse_rows_times_a_matrix() {
    let program = module(
        "cpu_csr_sparse_dense_ffi",
        "",
        &[a("3xf32"), a("4xi32"), a("3xi32"), a("2x2xf32")],
        &[a("3x2xf32")],
    )
    .replace(
        "dense<[0, 1]> : tensor<2xindex>",
        "dense<[1, 0]> : tensor<2xindex>",
    );
    let values = put(&[2_f32, 3., 4.], &[3]);
    let rhs = put(&[1_f32, 10., 100., 1000.], &[2, 2]);
    let starts = put(&[0, 1, 1, 3], &[4]);
    let outputs = run(&program, &[&values, &starts, &put(&[1, 0, 1], &[3]), &rhs]);
    let out: Vec<f32> = fetch(&outputs.expect("it runs")[0]);
    assert_eq!(out, [200., 2000., 0., 0., 403., 4030.]);
    for (starts, columns) in [
        ([0, 1, 1, 3], [1, 0, 2]),
        ([0, 1, 1, 3], [1, -1, 1]),
        ([0, 1, 1, 4], [1, 0, 1]),
    ] {
        let (starts, columns) = (put(&starts, &[4]), put(&columns, &[3]));
        let error = run(&program, &[&values, &starts, &columns, &rhs]).expect_err("out of range");
        assert_eq!(error.code(), Code::InvalidArgument, "{error}");
    }
}

#[test]
fn wrong_calls_are_refused_by_name() {
    let x = put(&[1., 0., 0., 1.], &[2, 2]);
    let (good, out) = ("uplo = 76 : ui8", [a("2x2xf64"), a("i32")]);
    for (attributes, results, what) in [
        ("", &out[..], "the attribute uplo is missing"),
        ("uplo = 77 : ui8", &out, "letters LU"),
        ("uplo = 76 : i32", &out, "letters LU"),
        ("uplo = \"L\"", &out, "letters LU"),
        (good, &out[..1], "1 operands and 2 results are wanted"),
        (good, &[a("2x2xf32"), a("i32")], "result 0 is f32[2,2]"),
        (
            good,
            &[a("2x3xf64"), a("i32")],
            "result 0 is f64[2,3], and [2,2] is wanted",
        ),
        (
            good,
            &[a("2x2xf64"), a("2xi32")],
            "result 1 is s32[2], and [] is wanted",
        ),
        (
            good,
            &[a("2x2xf64"), a("i8")],
            "result 1 is s8[], and s32 is wanted",
        ),
    ] {
        let program = module("lapack_dpotrf_ffi", attributes, &[a("2x2xf64")], results);
        let error = run(&program, &[&x]).expect_err(what);
        assert_eq!(error.code(), Code::InvalidArgument, "{error}");
        assert!(error.message().contains(what), "{error} without {what:?}");
    }
    for (shape, what) in [
        (&[4][..], "1 dimensions"),
        (&[1, 4], "square ones are wanted"),
    ] {
        let text = shape
            .iter()
            .map(|dim| format!("{dim}x"))
            .collect::<String>()
            + "f64";
        let operand = put(&[1., 0., 0., 1.], shape);
        let program = module(
            "lapack_dpotrf_ffi",
            good,
            &[a(&text)],
            &[a(&text), a("i32")],
        );
        let error = run(&program, &[&operand]).expect_err(what);
        assert!(error.message().contains(what), "{error} without {what:?}");
    }
}

#[test]
fn empty_batches_and_matrices_are_no_work() {
    let program = module(
        "lapack_dgeqrf_ffi",
        "",
        &[a("0x3x2xf64")],
        &[a("0x3x2xf64"), a("0x2xf64")],
    );
    let program = rows_last(&program);
    let outputs = run(&program, &[&put::<f64>(&[], &[0, 3, 2])]).expect("it runs");
    assert_eq!(outputs[0].dims(), [0, 3, 2]);
    let program = module(
        "lapack_dsyevd_ffi",
        "uplo = 76 : ui8, mode = 86 : ui8",
        &[a("2x0x0xf64")],
        &[a("2x0x0xf64"), a("2x0xf64"), a("2xi32")],
    );
    let program = rows_last(&program);
    let outputs = run(&program, &[&put::<f64>(&[], &[2, 0, 0])]).expect("it runs");
    assert_eq!(fetch::<i32>(&outputs[2]), [0, 0]);
}

/// Without elements the order makes no difference, and this plugin dies of a transposition of none.
fn rows_last(program: &str) -> String {
    program
        .replace("dense<[1, 2, 0]>", "dense<[2, 1, 0]>")
        .replace(
            "dense<[0, 1]> : tensor<2xindex>",
            "dense<[1, 0]> : tensor<2xindex>",
        )
}

#[test]
fn other_libraries_are_refused() {
    let _ = client();
    let plugin = discover::resolve("cpu", Some(&python())).expect("a CPU plugin");
    let plugin = Plugin::load(&plugin).expect("the plugin loads");
    let error = register(&plugin, Path::new("/no/such/lapack.so")).expect_err("another");
    assert!(matches!(error, Error::Other { .. }), "{error}");
}
