//! A shared prefix read once, against the same batch without a word of what it shares, paired in one run.
//!
//! `cargo bench --bench shared` measures 16 requests of one token that share 4,096 tokens and have 64 of their own (8 query
//! heads over 2 KV heads, dimension 128, f16, pages of 16); `PAGED_ATTENTION_ADAPTER` names an adapter. Contenders:
//!
//! - flat: the plain plan over the shared pages, which a cache of the processor may keep from one request to the next;
//! - copies: the plain plan where every request has the prefix in pages of its own;
//! - shared: the prefix declared, with the kernels that the rule chooses;
//! - named: the same with the variants given as arguments, as in
//!   `cargo bench --bench shared -- prefill-broadcast8-r8k4l8s32768a+decode-streams8`.
//!
//! Every result is judged by its bound first; a round times every contender once, in alternating order, and a ratio is the
//! median over rounds of the ratio inside one round.
//!
//! Without `--bench` (as `cargo test --benches` does) only the checks run.

#![allow(missing_docs, reason = "a program, not a library")]
#![allow(clippy::print_stdout, reason = "its purpose")]

use std::error::Error;

use paged_attention::kernels::{AdapterFacts, Variants};
use paged_attention::{
    Attention, AttentionConfig, AttentionIo, Batch, Call, Case, Computed, DevicePlan, Dtype, Extras, KvLayout,
    KvSource, Status, Workspace, adapter, verify,
};
use paged_attention_bench_kit::{Gpu, median};
use paged_attention_cases::{build, shared_speed};

const ROUNDS: usize = 15;

/// Seconds that one timing takes at least.
const TARGET_S: f64 = 0.05;

fn main() -> Result<(), Box<dyn Error>> {
    let mut gpu = Gpu::open(std::env::var("PAGED_ATTENTION_ADAPTER").ok().as_deref())?;
    println!("{}", adapter::describe(gpu.runner.adapter_info()));
    let spec = shared_speed();
    println!("{spec}");
    let (case, copies) = (build(&spec)?, build(&spec.shared_prefix(0))?);
    let mut contenders = vec![
        Contender::new(&mut gpu, "flat", &case, false, None)?,
        Contender::new(&mut gpu, "copies", &copies, false, None)?,
        Contender::new(&mut gpu, "shared", &case, true, None)?,
    ];
    for variants in std::env::args().skip(1).filter(|argument| !argument.starts_with("--")) {
        contenders.push(Contender::new(&mut gpu, "named", &case, true, Some(variants.parse()?))?);
    }
    if std::env::args().any(|argument| argument == "--bench") {
        let repeats: Vec<u32> = contenders
            .iter()
            .map(|contender| gpu.repeats(&|encoder| contender.encode(encoder), TARGET_S))
            .collect::<Result<_, _>>()?;
        for round in 0..ROUNDS {
            let mut order: Vec<_> = contenders.iter_mut().zip(&repeats).collect();
            if round % 2 == 1 {
                order.reverse();
            }
            for (contender, repeats) in order {
                let seconds = gpu.seconds(&|encoder| contender.encode(encoder), *repeats)? / f64::from(*repeats);
                contender.seconds.push(seconds);
            }
        }
    }
    let ratio = |over: &str, under: &Contender| {
        let over = contenders.iter().find(|contender| contender.name == over).map_or(&[][..], |over| &over.seconds);
        median(&over.iter().zip(&under.seconds).map(|(over, under)| over / under).collect::<Vec<_>>())
    };
    for contender in &contenders {
        let Contender { name, variants, kv_bytes, ratio: bound, seconds, .. } = contender;
        println!(
            "{name:8} {:8.3} ms  {:6.2} MB of K and V read by count  flat / this {:.2}  copies / this {:.2}  \
             measured/bound {bound:.4}  {variants}",
            1e3 * median(seconds),
            1e-6 * *kv_bytes as f64,
            ratio("flat", contender),
            ratio("copies", contender),
        );
    }
    Ok(())
}

/// A call that is ready to be recorded, and its times.
struct Contender {
    name: &'static str,
    call: Call,
    variants: Variants,
    kv_bytes: u64,
    ratio: f64,
    seconds: Vec<f64>,
}

impl Contender {
    /// Binds the call, runs it once and judges its result.
    fn new(
        gpu: &mut Gpu,
        name: &'static str,
        case: &Case,
        shared: bool,
        variants: Option<Variants>,
    ) -> Result<Self, Box<dyn Error>> {
        let KvSource::Paged { k_pages, v_pages, page_indptr, page_ids, kv_len } = case.kv() else {
            return Err("the case is not paged".into());
        };
        let page_size = case.page_size().ok_or("the case is not paged")?;
        let geometry = *case.geometry();
        let layout =
            KvLayout::new(geometry, k_pages.dtype(), page_size, *k_pages.shape().first().unwrap_or(&0) as u32)?;
        let extras = Extras { shared_prefixes: shared, ..Extras::NONE };
        let q = case.q().dtype();
        let config =
            AttentionConfig { q, out: Dtype::F32, layout, new_rows: q.into(), options: *case.options(), extras };
        let variants = match variants {
            Some(variants) => variants,
            None => {
                let facts = AdapterFacts::new(gpu.runner.adapter_info(), gpu.device());
                gpu.runner.choose(&config.kernels(Variants::base(&facts, &geometry)))?.variants
            }
        };
        let attention = Attention::with_kernels(gpu.runner.kernels(&config.kernels(variants))?, &config)?;
        let batch = Batch { q_indptr: case.q_indptr(), page_indptr, page_ids, kv_len };
        let plan = if shared {
            attention.plan_shared(&batch, &batch.shared_prefixes(page_size, 1), None)?
        } else {
            attention.plan(&batch)?
        };

        let device = gpu.device();
        let mut pool = vec![0_u8; layout.bytes() as usize];
        for (tensor, rows, dim) in
            [(k_pages, layout.k_rows(), geometry.head_dim()), (v_pages, layout.v_rows(), geometry.v_head_dim())]
        {
            let heads = geometry.kv_heads();
            for (row, bytes) in (0..).zip(tensor.bytes().chunks_exact((dim * tensor.dtype().bytes()) as usize)) {
                let (token, kv_head): (u32, u32) = (row / heads, row % heads);
                let offset = rows.offset(token / page_size.get(), kv_head, token % page_size.get()) as usize * 16;
                pool.get_mut(offset..offset + bytes.len()).ok_or("a row lies outside its pool")?.copy_from_slice(bytes);
            }
        }
        let bytes = config.buffer_bytes(plan.total_q());
        let (q, kv) = (gpu.upload("q", case.q().bytes()), gpu.upload("kv", &pool));
        let (out, lse) = (gpu.zeros("out", bytes.out / 4), gpu.zeros("lse", bytes.lse / 4));
        let workspace = Workspace::new(device, plan.workspace_bytes())?;
        let [q, kv] = [&q, &kv].map(wgpu::Buffer::as_entire_buffer_binding);
        let io = AttentionIo {
            q,
            kv: vec![kv],
            out: out.as_entire_buffer_binding(),
            lse: lse.as_entire_buffer_binding(),
            heads: None,
            bias: None,
        };
        let call = attention.bind(device, &DevicePlan::upload(device, &plan)?, io, &workspace)?;
        let mut this = Self { name, call, variants, kv_bytes: plan.kv_bytes_read(), ratio: 0.0, seconds: Vec::new() };
        gpu.seconds(&|encoder| this.encode(encoder), 1)?;
        let status: Vec<u32> = gpu.read(workspace.status())?;
        Status::from_words(status.first_chunk().copied().ok_or("there is no status")?).check(this.call.workgroups())?;
        let (out, lse) = (gpu.read(&out)?, gpu.read(&lse)?);
        let report = verify(case, &Computed { out: &out, lse: &lse, out_dtype: Dtype::F32, chains: plan.chains() })?;
        if !report.passed() {
            return Err(format!("{name} is outside the bound:\n{report}").into());
        }
        this.ratio = report.max_bound_ratio;
        Ok(this)
    }

    fn encode(&self, encoder: &mut wgpu::CommandEncoder) {
        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
        self.call.encode(&mut pass);
    }
}
