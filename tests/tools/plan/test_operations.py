"""What a program computes and moves, from the text of its HLO."""

import pytest

from jaxrl.tools.plan.operations import KERNEL, Program

CYCLES = 'backend_config={"estimated_cycles":"7"}'
# A loop of 3 trips over a product in a fusion, and an update of a cache in place.
HLO = """HloModule m

%fused (p0: bf16[8,16], p1: bf16[3,16,4]) -> f32[8,4] {
  %p0 = bf16[8,16]{1,0} parameter(0)
  %p1 = bf16[3,16,4]{2,1,0} parameter(1)
  %one = bf16[1,16,4]{2,1,0} dynamic-slice(%p1, %i, %z, %z), dynamic_slice_sizes={1,16,4}
  %w = bf16[16,4]{1,0} bitcast(%one)
  ROOT %c = f32[8,4]{1,0} convolution(%p0, %w), dim_labels=bf_io->bf, metadata={op_name="mlp/dot"}
}

%update (p0: f32[100,8], p1: f32[1,8]) -> f32[100,8] {
  %p0 = f32[100,8]{1,0} parameter(0)
  %p1 = f32[1,8]{1,0} parameter(1)
  ROOT %u = f32[100,8]{1,0} dynamic-update-slice(%p0, %p1, %i, %z)
}

%body (s: (s32[], bf16[8,16])) -> (s32[], bf16[8,16]) {
  %s = (s32[], bf16[8,16]{1,0}, bf16[3,16,4]{2,1,0}) parameter(0)
  %x = bf16[8,16]{1,0:T(8,128)S(1)} get-tuple-element(%s), index=1
  %w = bf16[3,16,4]{2,1,0} get-tuple-element(%s), index=2
  %f = f32[8,4]{1,0} fusion(%x, %w), kind=kOutput, calls=%fused, CYCLES
  ROOT %t = (s32[], bf16[8,16]) tuple(%s, %x)
}

%cond (s: (s32[], bf16[8,16])) -> pred[] {
  ROOT %lt = pred[] constant(true)
}

ENTRY %main (a: bf16[8,16]) -> f32[8] {
  %cache = f32[100,8]{1,0} parameter(0)
  %line = f32[1,8]{1,0} parameter(1)
  %new = f32[100,8]{1,0} fusion(%cache, %line), kind=kLoop, calls=%update
  %loop = (s32[], bf16[8,16]) while(%init), condition=%cond, body=%body, KNOWN
  %start = (f32[100,8]{1,0:S(1)}, f32[100,8]{1,0}, u32[]) copy-start(%new)
  %done = f32[100,8]{1,0:S(1)} copy-done(%start)
  %sorted = (f32[5], s32[5]) sort(%k, %v), dimensions={0}, to_apply=%less
  %newer = f32[100,8]{1,0} dynamic-update-slice(%new, %line, %i, %z)
  %kernel = f32[6]{0} custom-call(%line), custom_call_target="TARGET"
}
""".replace("TARGET", KERNEL).replace("CYCLES", CYCLES)
FIXED = HLO.replace("KNOWN", 'backend_config={"known_trip_count":{"n":"3"}}')


def test_totals():
    totals = Program(FIXED).totals()
    assert totals.cycles == 3 * 7
    # 2 x 8 x 4 results x 16 each, in three trips
    assert totals.products == {"bf16 x bf16 -> f32": 3 * 2 * 8 * 4 * 16}
    assert totals.flops == 3072
    # a trip reads one matrix of three, 16 x 4 x 2 bytes, and writes 8 x 4 x 4; its rows lie in fast
    # memory. The cache is updated in place: a line of 8 x 4 bytes is read, and written. Then it is
    # copied to fast memory: 100 x 8 x 4. The sort writes 5 x (4 + 4). A second update is not fused.
    assert totals.moved == 3 * (128 + 128) + (32 + 32) + 3200 + 40 + (32 + 32)
    assert totals.kernel_moved == 6 * 4 + 8 * 4


def test_a_scatter_writes_in_place():
    """Two lines of 8 x 4 bytes are read, and written, and where they go, 2 x 4: not the cache."""
    text = """%put (p0: f32[100,8], p1: s32[2], p2: f32[2,8]) -> f32[100,8] {
  %p0 = f32[100,8]{1,0} parameter(0)
  %p1 = s32[2]{0} parameter(1)
  %p2 = f32[2,8]{1,0} parameter(2)
  ROOT %s = f32[100,8]{1,0} scatter(%p0, %p1, %p2), to_apply=%second
}

ENTRY %main (a: f32[100,8]) -> f32[100,8] {
  %cache = f32[100,8]{1,0} parameter(0)
  %to = s32[2]{0} parameter(1)
  %lines = f32[2,8]{1,0} parameter(2)
  ROOT %new = f32[100,8]{1,0} fusion(%cache, %to, %lines), kind=kCustom, calls=%put
}"""
    assert Program(text).totals().moved == 2 * 64 + 8


def test_a_loop_whose_count_varies_has_the_trips_that_are_said():
    assert Program(HLO, trips=5).totals().flops == 5 * 1024
    (product,) = Program(HLO).products()
    assert (product.fixed, product.total(trips=5), product.source) == (False, 5 * 1024, "mlp/dot")


def test_what_is_found_has_a_kind_and_a_size():
    program = Program(FIXED)
    assert [(one.array, one.amount) for one in program.find(("sort",))] == [
        ("(f32[5], s32[5])", 40)
    ]
    assert [one.array for one in program.find(("copy-done",), least=3200)] == ["f32[100,8]"]
    assert program.find(("copy-done",), least=3201) == []


@pytest.mark.parametrize(
    ("operation", "flops"),
    [
        # a dot over the last dim of 5
        ("f32[2,7] dot(%l, %r), lhs_contracting_dims={1}, rhs_contracting_dims={1}", 2 * 2 * 7 * 5),
        # 3 outputs of a window of 3, padded so that the one number meets each tap once
        (
            "f32[2,3,7] convolution(%a, %b), window={size=3 pad=2_2 rhs_reversal=1}, "
            "dim_labels=bf0_0oi->b0f",
            2 * 2 * 7 * 5 * 3,
        ),
        # a batch of 4: strides and dilation leave one product of four for each result
        (
            "f32[4,2,7] convolution(%c, %d), window={size=4 stride=3 lhs_dilate=4}, "
            "dim_labels=0bf_0io->0bf",
            2 * 4 * 2 * 7 * 5,
        ),
    ],
)
def test_products(operation, flops):
    text = f"""ENTRY %main (l: f32[2,5]) -> f32[2] {{
  %l = f32[2,5]{{1,0}} parameter(0)
  %r = f32[7,5]{{1,0}} parameter(1)
  %a = f32[2,5,1]{{1,0,2}} parameter(2)
  %b = f32[3,7,5]{{1,0,2}} parameter(3)
  %c = f32[4,2,5]{{1,0,2}} parameter(4)
  %d = f32[4,5,7]{{1,0,2}} parameter(5)
  ROOT %p = {operation}
}}"""
    assert Program(text).totals().products == {"f32 x f32 -> f32": flops}
