//! Generation step by step, as a server does it: sequences come, grow token by token and go, and their pages are
//! used again.

use paged_attention::{
    Append, AppendPlan, AppendSource, Attention, AttentionConfig, AttentionIo, Batch, Chains, Computed, Dtype, Extras,
    KvLayout, PageSize, Tensor, Workspace, verify, wgpu,
};
use paged_attention_cases::{CaseSpec, Heads, Pool, Sequence, assemble, generate};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;

use super::host::{Guarded, Host, UNWRITTEN, host, owned, padded_rows};
use crate::common::{CONFIGS, Tally, bits, gpu, is_decode, plain_options, rows_of};

/// How the append and the attention over its rows are recorded.
#[derive(Clone, Copy, Debug)]
enum Recorded {
    OnePass,
    TwoPasses,
    TwoSubmits,
}

/// A server's cache: the pool, and who holds which pages.
struct Server<'h> {
    host: &'h Host,
    attention: Attention,
    heads: Heads,
    dtype: Dtype,
    kv: Guarded,
    workspace: Workspace,
    free: Vec<u32>,
    tables: Vec<Vec<u32>>,
    /// Tokens in the cache.
    lengths: Vec<u32>,
    workgroups: u32,
}

/// What a step leaves behind, to be read when all is submitted.
struct Step {
    q_lens: Vec<u32>,
    kv_lens: Vec<u32>,
    chains: Vec<Chains>,
    out: Guarded,
    lse: Guarded,
    /// The sources live as long as the results.
    inputs: [Guarded; 3],
}

impl<'h> Server<'h> {
    fn new(host: &'h Host, dtype: Dtype, heads: Heads, page_size: u32, page_count: u32, seqs: usize) -> Self {
        let geometry = heads.geometry().unwrap();
        let layout = KvLayout::new(geometry, dtype, PageSize::new(page_size).unwrap(), page_count).unwrap();
        let options = paged_attention::AttentionOptions::new(&geometry).with_causal(true);
        let attention = host.attention(&AttentionConfig {
            q: dtype,
            out: Dtype::F32,
            layout,
            new_rows: dtype.into(),
            options,
            extras: Extras::NONE,
        });
        let mut free: Vec<u32> = (0..page_count).collect();
        free.shuffle(&mut StdRng::seed_from_u64(3));
        Self {
            host,
            attention,
            heads,
            dtype,
            kv: Guarded::new(host, &vec![UNWRITTEN; layout.bytes() as usize]),
            workspace: Workspace::new(&host.device, 1 << 20).unwrap(),
            free,
            tables: vec![Vec::new(); seqs],
            lengths: vec![0; seqs],
            workgroups: 0,
        }
    }

    fn leave(&mut self, seq: usize) {
        self.free.append(&mut self.tables[seq]);
        self.lengths[seq] = 0;
    }

    /// Appends the next `new[i]` tokens of every sequence and attends to all of its keys.
    fn step(&mut self, sequences: &[Sequence], new: &[u32], recorded: Recorded) -> Step {
        let layout = self.attention.config().layout;
        let [mut q_indptr, mut page_indptr, mut page_ids] = [vec![0], vec![0], vec![]];
        let [mut q, mut k, mut v] = [const { Vec::new() }; 3];
        let Heads { q_heads, kv_heads, head_dim, v_head_dim } = self.heads;
        for (seq, new) in new.iter().copied().enumerate() {
            let (first, kv_len) = (self.lengths[seq], self.lengths[seq] + new);
            while (self.tables[seq].len() as u32) < layout.page_size().pages_for(kv_len) {
                self.tables[seq].push(self.free.pop().unwrap());
            }
            self.lengths[seq] = kv_len;
            q_indptr.push(q_indptr[seq] + new);
            page_ids.extend_from_slice(&self.tables[seq]);
            page_indptr.push(page_ids.len() as u32);
            let s = &sequences[seq];
            for (to, from, row) in [
                (&mut q, &s.q, q_heads * head_dim),
                (&mut k, &s.k, kv_heads * head_dim),
                (&mut v, &s.v, kv_heads * v_head_dim),
            ] {
                to.extend_from_slice(&from[(first * row) as usize..(kv_len * row) as usize]);
            }
        }
        let batch =
            Batch { q_indptr: &q_indptr, page_indptr: &page_indptr, page_ids: &page_ids, kv_len: &self.lengths };
        let total = batch.total_q();
        let inputs = [(&q, q_heads, head_dim), (&k, kv_heads, head_dim), (&v, kv_heads, v_head_dim)].map(
            |(values, heads, dim)| {
                let shape = [total, heads, dim].map(|n| n as usize);
                let tensor = Tensor::from_f32(self.dtype, &shape, values).unwrap();
                Guarded::new(self.host, &padded_rows(&tensor, dim))
            },
        );
        let rows = u64::from(total * q_heads);
        let out = Guarded::unwritten(self.host, rows * u64::from(Dtype::F32.row_words(v_head_dim)) * 4);
        let lse = Guarded::unwritten(self.host, rows * 4);

        let device = &self.host.device;
        let append = AppendPlan::new(&layout, &batch).unwrap();
        let append = Append::upload(device, &append).unwrap();
        let source = AppendSource {
            k: inputs[1].binding(),
            v: inputs[2].binding(),
            kv: vec![self.kv.binding()],
            head_scales: None,
        };
        let append = append.bind(device, self.attention.kernels(), source, &self.workspace).unwrap();
        let plan = self.attention.plan(&batch).unwrap();
        let device_plan = paged_attention::DevicePlan::upload(device, &plan).unwrap();
        let io = AttentionIo {
            q: inputs[0].binding(),
            kv: vec![self.kv.binding()],
            out: out.binding(),
            lse: lse.binding(),
            heads: None,
            bias: None,
        };
        let call = self.attention.bind(device, &device_plan, io, &self.workspace).unwrap();
        match recorded {
            Recorded::OnePass => self.host.submit(|pass| {
                append.encode(pass);
                call.encode(pass);
            }),
            Recorded::TwoPasses => {
                let mut encoder = self.host.encoder();
                append.encode(&mut encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default()));
                let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
                call.encode(&mut pass);
                drop(pass);
                self.host.queue.submit([encoder.finish()]);
            }
            Recorded::TwoSubmits => {
                self.host.submit(|pass| append.encode(pass));
                self.host.submit(|pass| call.encode(pass));
            }
        }
        self.workgroups += append.workgroups() + call.workgroups();
        let chains = plan.chains().to_vec();
        Step { q_lens: new.to_vec(), kv_lens: self.lengths.clone(), chains, out, lse, inputs }
    }

    /// Output and log-sum-exp of a step.
    fn results(&self, step: &Step) -> [Vec<f32>; 2] {
        for (what, input) in ["q", "k", "v"].into_iter().zip(&step.inputs) {
            input.read(self.host, what);
        }
        let rows = step.q_lens.iter().sum::<u32>() as usize * self.heads.q_heads as usize;
        let [mut out, mut lse] = [&step.out, &step.lse].map(|range| range.read(self.host, "results"));
        out.truncate(rows * Dtype::F32.row_words(self.heads.v_head_dim) as usize * 4);
        lse.truncate(rows * 4);
        [owned(Dtype::F32, &out, self.heads.v_head_dim), owned(Dtype::F32, &lse, 1)]
    }
}

/// Tokens of each sequence in the first step, and when it comes and goes. The third reaches a second split, the last
/// one comes late and takes the pages of the one that has gone.
const PROMPTS: [u32; 6] = [5, 40, 250, 1, 17, 33];
const COMES: [u32; 6] = [0, 0, 0, 0, 2, 9];
const GOES: [u32; 6] = [99, 8, 99, 99, 99, 99];
const STEPS: u32 = 16;

fn new_tokens(step: u32) -> Vec<u32> {
    (0..PROMPTS.len())
        .map(|seq| match step {
            _ if step < COMES[seq] || step >= GOES[seq] => 0,
            _ if step == COMES[seq] => PROMPTS[seq],
            _ => 1,
        })
        .collect()
}

fn totals() -> Vec<u32> {
    (0..PROMPTS.len()).map(|seq| (0..STEPS).map(|step| new_tokens(step)[seq]).sum()).collect()
}

#[test]
fn growing_token_by_token() {
    let (Some(gpu), Some(host)) = (gpu(), host()) else { return };
    let mut tally = Tally::new("api/steps");
    for (dtype, heads) in CONFIGS {
        let whole = CaseSpec::new("api/steps", heads, totals().into_iter().map(|n| (n, n))).dtype(dtype).causal(true);
        let whole = whole.contiguous(Pool::new(16).times(1)).seed(43);
        let sequences = generate(&whole).unwrap();
        for page_size in [1, 3, 16] {
            let spec = whole.clone().contiguous(Pool::new(page_size));
            // Room for the longest moment only.
            let size = PageSize::new(page_size).unwrap();
            let page_count = totals().into_iter().map(|n| size.pages_for(n)).sum::<u32>() - size.pages_for(33);
            let mut server = Server::new(host, dtype, heads, page_size, page_count, PROMPTS.len());
            let mut steps = Vec::new();
            for step in 0..STEPS {
                for seq in (0..PROMPTS.len()).filter(|seq| GOES[*seq] == step) {
                    server.leave(seq);
                }
                let recorded = [Recorded::OnePass, Recorded::TwoPasses, Recorded::TwoSubmits][step as usize % 3];
                steps.push(server.step(&sequences, &new_tokens(step), recorded));
            }
            host.status(&server.workspace).check(server.workgroups).unwrap();

            let mut rows = vec![[Vec::new(), Vec::new()]; PROMPTS.len()];
            let mut chains: Vec<Option<Chains>> = vec![None; PROMPTS.len()];
            for (number, step) in steps.iter().enumerate() {
                // The same rows over the same keys, by a run that knows nothing of the steps before.
                let what = format!("step {number} of {spec}");
                let parts: Vec<_> = sequences
                    .iter()
                    .zip(step.q_lens.iter().zip(&step.kv_lens))
                    .map(|(s, (q_len, kv_len))| s.chunk(&heads, kv_len - q_len, *kv_len, *kv_len))
                    .collect();
                let case = assemble(&spec, &parts).unwrap();
                let fresh = gpu.run(&case, &plain_options(page_size)).unwrap();
                let [out, lse] = server.results(step);
                tally.same(what, &case, bits("out", &out, &fresh.out).or(bits("lse", &lse, &fresh.lse)));
                let (mut out, mut lse) = (&out[..], &lse[..]);
                for (seq, q_len) in step.q_lens.iter().enumerate() {
                    let heads_of = (q_len * heads.q_heads) as usize;
                    let (out_part, out_rest) = out.split_at(heads_of * heads.v_head_dim as usize);
                    let (lse_part, lse_rest) = lse.split_at(heads_of);
                    rows[seq][0].extend_from_slice(out_part);
                    rows[seq][1].extend_from_slice(lse_part);
                    (out, lse) = (out_rest, lse_rest);
                    // The chain that is the longest in every respect covers all of a sequence's steps.
                    let this = &step.chains[seq];
                    let before = chains[seq].clone().unwrap_or(this.clone());
                    chains[seq] = Some(Chains {
                        dot: this.dot.max(before.dot),
                        step_keys: this.step_keys.min(before.step_keys),
                        accumulate: this.accumulate.max(before.accumulate),
                        scaled: false,
                        order: Vec::new(),
                    });
                }
            }
            // And all rows together are the attention of whole sequences.
            let case = assemble(&spec, &sequences).unwrap();
            let whole_run = gpu.run(&case, &plain_options(page_size)).unwrap();
            for (seq, prompt) in PROMPTS.into_iter().enumerate().filter(|(_, q_len)| !is_decode(&heads, *q_len)) {
                // A prompt's rows are of the same kernel in both.
                let expected = rows_of(&case, &whole_run, seq, 0, prompt);
                let [out, lse] = [&rows[seq][0][..expected.out.len()], &rows[seq][1][..expected.lse.len()]];
                let difference = bits("out", out, &expected.out).or(bits("lse", lse, &expected.lse));
                tally.same(format!("prompt {seq} of {spec}"), &case, difference);
            }
            let [out, lse] = [0, 1].map(|i| rows.iter().flat_map(|rows| rows[i].iter().copied()).collect::<Vec<f32>>());
            let chains: Vec<_> = chains.into_iter().flatten().collect();
            let computed = Computed { out: &out, lse: &lse, out_dtype: Dtype::F32, chains: &chains };
            match verify(&case, &computed) {
                Ok(report) if report.passed() => tally.ratio(report.max_bound_ratio, &spec),
                Ok(report) => tally.fail(&spec, Some(&case), report),
                Err(error) => tally.fail(&spec, Some(&case), error),
            }
        }
    }
    tally.finish();
}

/// All four kernels on a device that takes few workgroups on an axis.
#[test]
fn few_workgroups_on_an_axis() {
    const AXIS_MAX: u32 = 7;
    let (Some(gpu), Some(shared)) = (gpu(), host()) else { return };
    let heads = Heads::new(1, 1, 8);
    // Prompts, then a token each; most have two splits by then.
    let lengths = [301, 61, 301, 2, 301].into_iter().cycle().take(20);
    let spec = CaseSpec::new("api/axes", heads, lengths.map(|n| (n, n))).causal(true).contiguous(Pool::new(4)).seed(44);
    let sequences = generate(&spec).unwrap();
    let limits = wgpu::Limits { max_compute_workgroups_per_dimension: AXIS_MAX, ..wgpu::Limits::default() };
    let limited = Host::open(gpu, limits);
    for host in [&limited, shared] {
        let mut server = Server::new(host, Dtype::F32, heads, 4, 1100, sequences.len());
        let prompts: Vec<u32> = sequences.iter().map(|s| s.q_len - 1).collect();
        for new in [prompts, vec![1; sequences.len()]] {
            let before = server.workgroups;
            let step = server.step(&sequences, &new, Recorded::OnePass);
            assert!(server.workgroups - before > 4 * AXIS_MAX);
            host.status(&server.workspace).check(server.workgroups).unwrap();
            let parts = sequences.iter().zip(step.q_lens.iter().zip(&step.kv_lens));
            let parts: Vec<_> = parts.map(|(s, (q, kv))| s.chunk(&heads, kv - q, *kv, *kv)).collect();
            let case = assemble(&spec, &parts).unwrap();
            let fresh = gpu.run(&case, &plain_options(4)).unwrap();
            let merged = fresh.kernels.iter().find(|used| used.kernel == "merge");
            assert_eq!(merged.map(|used| used.workgroups), (new[0] == 1).then_some(12));
            let [out, lse] = server.results(&step);
            assert_eq!(bits("out", &out, &fresh.out).or(bits("lse", &lse, &fresh.lse)), None);
        }
    }
}
