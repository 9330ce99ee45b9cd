"""Collectives read from the text of a compiled program."""

from jaxrl.tools.plan import hlo

HLO = """
%fused (p: f32[8]) -> f32[2] {
  %all-gather.9 = f32[8]{0} all-gather(%p), replica_groups=[2,4]<=[8], chain_id="1"
  ROOT %c = (f32[8], u32[]) custom-call(%all-gather.9), custom_call_target="AsyncCollectiveStart"
}

%fused.again (p: f32[8]) -> f32[2] {
  %all-gather.10 = f32[8]{0} all-gather(%p), replica_groups=[2,4]<=[8], chain_id="1"
}

%all-reduce-scatter.1 (p: f32[8]) -> f32[2] {
  %all-reduce.1 = bf16[16,4]{1,0} all-reduce(%p), replica_groups={{0,2},{1,3}}, to_apply=%add
}

%body (p: s32[]) -> s32[] {
  %a = f32[2] fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1
  %b = f32[2] fusion(%p), kind=kCustom, calls=%fused
  %c = f32[2] fusion(%p), kind=kCustom, calls=%fused.again
}

%condition (p: s32[]) -> pred[] {
  %n = s32[] constant(24)
  ROOT %lt = pred[] compare(%p, %n), direction=LT
}

ENTRY %main (p: s32[]) -> s32[] {
  %w = s32[] while(%p), condition=%condition, body=%body
  %r = pred[6]{0} all-reduce(%p), replica_groups=mesh['a'=4,'b'=2] {'b'}, metadata={op_name="x/y"}
  %s = (s32[3], s32[3], u32[]) collective-permute-start(%p), source_target_pairs={{0,1},{1,2}}
}
"""


def test_collectives_of_a_program():
    found = {one.array.split("[")[0]: one for one in hlo.collectives(HLO)}
    assert len(found) == len(hlo.collectives(HLO)) == 4  # fused.again waits for what fused started
    scatter = found["bf16"]
    # 16 x 4 x 2 bytes, of which a ring of two sends half; once per trip
    assert (scatter.kind, scatter.size, scatter.moved, scatter.times) == (
        "reduce-scatter",
        128,
        64,
        24,
    )
    assert scatter.group == (0, 2)
    assert (found["f32"].kind, found["f32"].group) == ("all-gather", (0, 1, 2, 3))
    assert found["f32"].moved == 8 * 4 * 3 / 4
    reduce = found["pred"]
    # 6 bytes, there and back: 2 x 1 / 2
    assert (reduce.moved, reduce.times, reduce.group, reduce.source) == (6, 1, (0, 1), "x/y")
    assert found["(s32"].moved == (12 + 12 + 4) // 2


BLOCK = """
%pages (p: s32[]) -> s32[] {
  %a = f32[2] all-reduce(%p), replica_groups={{0,1}}, metadata={op_name="f/attention/pages"}
}

%chunk (p: s32[]) -> s32[] {
  %a = f32[2] all-reduce(%p), replica_groups={{0,1}}, metadata={op_name="f/chunk"}
  %w = s32[] while(%p), condition=%data, body=%pages, metadata={op_name="f/attention/while"}
}

%step (p: s32[]) -> s32[] {
  %a = f32[2] all-reduce(%p), replica_groups={{0,1}}, metadata={op_name="f/step"}
  %c = s32[] while(%p), condition=%data, body=%chunk, metadata={op_name="f/while/body/while"}
  %w = s32[] while(%p), condition=%data, body=%pages, metadata={op_name="f/attention/while"}
}

%data (p: s32[]) -> pred[] {
  ROOT %lt = pred[] compare(%p, %p), direction=LT
}

ENTRY %main (p: s32[]) -> s32[] {
  %w = s32[] while(%p), condition=%data, body=%step, metadata={op_name="f/while"}
}
"""


def test_loops_within_the_steps_of_a_block_run_as_often_as_is_said():
    def times(inner):
        found = hlo.collectives(BLOCK, inner)
        assert not any(one.fixed for one in found)
        return sorted((one.source, one.times) for one in found if one.times)

    # in each step attention reads five pages; no chunk
    assert times(hlo.Inner(given=0, pages=5)) == [("f/attention/pages", 5), ("f/step", 1)]
    # what three chunks add to a step: each reads two pages
    alone = hlo.Inner(given=3, pages=2, alone=True)
    assert times(alone) == [("f/attention/pages", 6), ("f/chunk", 3)]


def test_attributes_of_several_lines_do_not_end_a_computation():
    kernel = (
        '%k = f32[8] custom-call(%p), frontend_attributes={xprof_metadata={\n"block": 512\n}}, x=1'
    )
    text = f"ENTRY %main (p: f32[2]) -> f32[8] {{\n{kernel}\n%g = f32[8]{{0}} all-gather(%p), "
    (found,) = hlo.collectives(text + "replica_groups={{0,1,2,3}}\n}")
    assert found.group == (0, 1, 2, 3)


def test_loops_that_count_without_a_sign():
    body = HLO.replace("s32[] constant(24)", "u32[]{:T(128)} constant(4), metadata={}")
    scatter = next(one for one in hlo.collectives(body) if one.kind == "reduce-scatter")
    assert (scatter.times, scatter.fixed) == (4, True)


def test_groups_of_a_mesh_with_its_devices_in_another_order():
    # ids 0..7 as [4, 2], transposed and read as [2, 4]: 0 2 4 6 / 1 3 5 7; along the last axis
    line = (
        "%g = f32[8]{0} all-gather(%p), replica_groups=mesh['a'=2,'b'=4], "
        "device_ids=([4,2]T(1,0)) {'b'}"
    )
    (found,) = hlo.collectives("ENTRY %main (p: f32[2]) -> f32[8] {\n" + line + "\n}")
    assert found.group == (0, 2, 4, 6)
    assert found.moved == 8 * 4 * 3 / 4


WINDOWED = """
%body (p: (f32[8], u32[])) -> (f32[8], u32[]) {
  %one = u32[]{:T(128)} constant(1)
  %two = u32[]{:T(128)} constant(2), metadata={op_name="jit(f)/dot_general"}
  %p = (f32[8]{0}, /*index=1*/u32[]{:T(128)}) parameter(0)
  %i = u32[]{:T(128)} get-tuple-element(%p), index=1
  %x = f32[8]{0} get-tuple-element(%p), index=0
  %half = u32[]{:T(128)} add(%i, %one)
  %sent = f32[8]{0} collective-permute(%x), source_target_pairs={{0,1},{1,0}}
  %next = u32[]{:T(128)} add(%i, %two), metadata={op_name="jit(f)/dot_general"}
  ROOT %t = (f32[8]{0}, /*index=1*/u32[]{:T(128)}) tuple(%sent, /*index=1*/%next)
}

%condition (p: (f32[8], u32[])) -> pred[] {
  %n = u32[]{:T(128)} constant(4)
  %p = (f32[8]{0}, u32[]{:T(128)}) parameter(0)
  %i = u32[]{:T(128)} get-tuple-element(%p), index=1
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (p: (f32[8], u32[])) -> (f32[8], u32[]) {
  ROOT %w = (f32[8], u32[]) while(%p), condition=%condition, body=%body
}
"""


def test_a_loop_that_counts_by_twos_has_half_the_trips():
    """As the compiler writes a matrix product over a ring: windows 0 and 1, then 2 and 3."""
    (permute,) = hlo.collectives(WINDOWED)
    assert (permute.times, permute.fixed) == (2, True)
    (permute,) = hlo.collectives(WINDOWED.replace("add(%i, %two)", "add(%one, %i)"))
    assert permute.times == 4
    (permute,) = hlo.collectives(WINDOWED.replace("constant(4)", "constant(5)"))
    assert permute.times == 3  # 0, 2, 4
