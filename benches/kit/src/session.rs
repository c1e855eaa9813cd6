//! Paired rounds over shapes, baseline and limits.

use std::collections::BTreeMap;

use paged_attention::Choice;

use crate::error::BenchError;
use crate::gpu::{Gpu, best, median};
use crate::judge::{Accuracy, Judge};
use crate::limits::{FmaRate, Latency, ReadRate};
use crate::paged::{Paged, Paging, Selection};
use crate::problem::Problem;
use crate::unfused::Unfused;

/// How to measure.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    /// Rounds: an odd number, so that a median is one of them.
    pub rounds: usize,
    /// Seconds that one timing takes at least, by repeating what is shorter.
    pub target_s: f64,
    /// Which kernels.
    pub selection: Selection,
    /// Tokens per page.
    pub page_size: u32,
}

impl Options {
    /// Seven rounds of timings of 50 ms, pages of 16.
    pub const FULL: Self = Self { rounds: 7, target_s: 0.05, selection: Selection::Chosen, page_size: 16 };

    /// Three rounds of timings of 10 ms: to see that everything runs, not to quote.
    pub const QUICK: Self = Self { rounds: 3, target_s: 0.01, ..Self::FULL };
}

/// Who computes a shape. In a round each has its turn in this order, or in the reverse.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Contender {
    /// The call on one page per sequence.
    Contiguous,
    /// The call on scattered pages: the one that the figures are of.
    Paged,
    /// Decodes and prompts in calls of their own, where the shape has both.
    Apart,
    /// The call on scattered pages of a single token.
    PageOfOne,
    /// The unfused baseline; decodes and prompts in calls of their own.
    Unfused,
}

impl Contender {
    /// As reports call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Contiguous => "contiguous",
            Self::Paged => "paged",
            Self::Apart => "apart",
            Self::PageOfOne => "page_of_one",
            Self::Unfused => "unfused",
        }
    }
}

/// What one shape showed, a value per round.
#[derive(Clone, Debug, Default)]
pub struct Series {
    /// Seconds of each contender that takes part.
    pub seconds: BTreeMap<Contender, Vec<f64>>,
    /// Reading rate in 10^9 bytes per second at the size of this shape's keys and values.
    pub read_gbps: Vec<f64>,
    /// The way of reading that was the fastest in the last round.
    pub read_pattern: String,
}

impl Series {
    /// Seconds of one contender; none where it takes no part.
    pub fn of(&self, contender: Contender) -> &[f64] {
        self.seconds.get(&contender).map_or(&[], Vec::as_slice)
    }
}

/// The adapter's limits, a value per round.
#[derive(Clone, Debug, Default)]
pub struct Limits {
    /// Multiply-adds in registers, 10^9 operations per second.
    pub fma_gflops: Vec<f64>,
    /// Microseconds of an almost empty dispatch with submit and wait.
    pub dispatch_us: Vec<f64>,
    /// Microseconds of one of 100 such dispatches in one submit.
    pub dispatch_among_us: Vec<f64>,
}

/// One shape, checked and measured.
#[derive(Debug)]
pub struct Measured {
    /// The shape.
    pub problem: Problem,
    /// The kernels that ran.
    pub kernel: String,
    /// Milliseconds that they took to compile, whichever shape had them made.
    pub compile_ms: f64,
    /// Variants that were preferred, and why they were not taken.
    pub stepped_down: Vec<String>,
    /// How the runner chose, where it did.
    pub choice: Option<Choice>,
    /// Microseconds to record the call.
    pub encode_us: f64,
    /// The worst of the call and the baseline. Other contenders have the call's bits.
    pub accuracy: Accuracy,
    /// Output rows that were compared, and that there are.
    pub coverage: (usize, usize),
    /// Why there is no baseline.
    pub no_unfused: Option<String>,
    /// What was measured.
    pub series: Series,
}

impl Measured {
    /// Median of the paged call's times.
    pub fn median_s(&self) -> f64 {
        median(self.series.of(Contender::Paged))
    }

    /// Least of the paged call's times.
    pub fn best_s(&self) -> f64 {
        best(self.series.of(Contender::Paged))
    }

    /// 10^9 operations per second at the median.
    pub fn gflops(&self) -> f64 {
        1e-9 * self.problem.flop() / self.median_s()
    }

    /// 10^9 bytes of keys and values per second at the median.
    pub fn kv_gbps(&self) -> f64 {
        1e-9 * self.problem.kv_bytes() / self.median_s()
    }

    /// The best reading rate.
    pub fn read_gbps(&self) -> f64 {
        self.series.read_gbps.iter().copied().fold(0.0, f64::max)
    }

    /// The share of what the adapter can do at most, best over best: of the multiply-add rate, of the reading rate for
    /// sequences with one query row.
    pub fn share(&self, limits: &Limits) -> f64 {
        self.problem.limit_s(limits.fma_best(), self.read_gbps()) / self.best_s()
    }

    /// Median of the rounds' ratios of one contender's time to another's; `None` where one takes no part.
    pub fn ratio(&self, over: Contender, under: Contender) -> Option<f64> {
        let rounds = self.series.of(over).iter().zip(self.series.of(under));
        let ratios: Vec<f64> = rounds.map(|(over, under)| over / under).collect();
        (!ratios.is_empty()).then(|| median(&ratios))
    }
}

impl Limits {
    /// The best multiply-add rate.
    pub fn fma_best(&self) -> f64 {
        self.fma_gflops.iter().copied().fold(0.0, f64::max)
    }
}

/// A contender that is ready to be timed.
struct Entry {
    contender: Contender,
    record: Box<dyn Fn(&mut wgpu::CommandEncoder)>,
    /// Calls per timing.
    repeats: u32,
}

struct Timed {
    measured: Measured,
    entries: Vec<Entry>,
    read: ReadRate,
    /// The call's output, and the bits that were judged: to be compared once more at the end.
    out: wgpu::Buffer,
    bits: Vec<u32>,
}

/// Shapes that were checked and are ready for rounds.
pub struct Session {
    options: Options,
    fma: FmaRate,
    latency: Latency,
    limits: Limits,
    shapes: Vec<Timed>,
}

impl Session {
    /// Steps that [`Session::new`] and [`Session::run`] report for so many shapes.
    pub fn steps(shapes: usize, options: &Options) -> usize {
        1 + shapes + options.rounds * (1 + shapes)
    }

    /// Prepares every shape and compares every result with float64. `step` hears what is about to be done.
    ///
    /// # Errors
    /// [`BenchError`], of the first shape that is wrong or cannot be run.
    pub fn new(
        gpu: &mut Gpu,
        problems: Vec<Problem>,
        options: Options,
        step: &mut dyn FnMut(&str),
    ) -> Result<Self, BenchError> {
        step("limits");
        let fma = FmaRate::new(gpu, options.target_s)?;
        let latency = Latency::new(gpu)?;
        let mut shapes = Vec::new();
        for problem in problems {
            step(&format!("checking {}", problem.name()));
            shapes.push(prepare(gpu, problem, &options)?);
        }
        Ok(Self { options, fma, latency, limits: Limits::default(), shapes })
    }

    /// All rounds. Every other one goes through the shapes and their contenders backwards.
    ///
    /// # Errors
    /// [`BenchError::Device`]; [`BenchError::Wrong`] where an output changed while it was being timed.
    pub fn run(mut self, gpu: &Gpu, step: &mut dyn FnMut(&str)) -> Result<(Limits, Vec<Measured>), BenchError> {
        let rounds = self.options.rounds;
        for round in 0..rounds {
            step(&format!("round {} of {rounds}, limits", round + 1));
            self.limits.fma_gflops.push(self.fma.gflops(gpu)?);
            self.limits.dispatch_us.push(self.latency.dispatch_us(gpu, 1)?);
            self.limits.dispatch_among_us.push(self.latency.dispatch_us(gpu, 100)?);
            let backwards = round % 2 == 1;
            let mut order: Vec<&mut Timed> = self.shapes.iter_mut().collect();
            if backwards {
                order.reverse();
            }
            for shape in order {
                step(&format!("round {} of {rounds}, {}", round + 1, shape.measured.problem.name()));
                shape.round(gpu, backwards)?;
            }
        }
        for shape in &self.shapes {
            if gpu.read::<u32>(&shape.out)? != shape.bits {
                return Err(BenchError::Device(format!(
                    "{}: the output is not the one that was checked",
                    shape.measured.problem.name()
                )));
            }
        }
        Ok((self.limits, self.shapes.into_iter().map(|shape| shape.measured).collect()))
    }
}

impl Timed {
    fn round(&mut self, gpu: &Gpu, backwards: bool) -> Result<(), BenchError> {
        let series = &mut self.measured.series;
        let mut entries: Vec<Option<&Entry>> = self.entries.iter().map(Some).chain([None]).collect();
        if backwards {
            entries.reverse();
        }
        for entry in entries {
            match entry {
                Some(Entry { contender, record, repeats }) => {
                    let seconds = gpu.seconds(record, *repeats)? / f64::from(*repeats);
                    series.seconds.entry(*contender).or_default().push(seconds);
                }
                None => {
                    let (rate, pattern) = self.read.gbps(gpu)?;
                    series.read_gbps.push(rate);
                    series.read_pattern = pattern.to_owned();
                }
            }
        }
        Ok(())
    }
}

fn prepare(gpu: &mut Gpu, problem: Problem, options: &Options) -> Result<Timed, BenchError> {
    let Options { selection, page_size, .. } = *options;
    let judge = Judge::new(&problem)?;
    let paged = Paged::new(gpu, &problem, Paging::Scattered(page_size), selection)?;
    let mut accuracy = paged.accuracy(gpu, &judge, Contender::Paged.name())?;
    let (bits, encode_us) = (paged.bits(gpu)?, paged.encode_us(gpu));
    let (kernel, compile_ms, stepped_down) = (paged.kernel.clone(), paged.compile_ms, paged.stepped_down.clone());
    let choice = paged.choice.clone();

    type Records = Vec<(Contender, Box<dyn Fn(&mut wgpu::CommandEncoder)>)>;
    let mut records: Records = Vec::new();
    // Pages and neighbours change no bit of a result.
    let same = |contender: Contender, found: &[u32], needed: &[u32]| match found == needed {
        true => Ok(()),
        false => Err(BenchError::Differs { name: problem.name().to_owned(), contender: contender.name() }),
    };
    for (contender, paging) in
        [(Contender::Contiguous, Paging::Contiguous), (Contender::PageOfOne, Paging::Scattered(1))]
    {
        let call = Paged::new(gpu, &problem, paging, selection)?;
        same(contender, &call.bits(gpu)?, &bits)?;
        records.push((contender, Box::new(move |encoder| call.encode(encoder))));
    }
    let groups = problem.groups()?;
    if groups.len() > 1 {
        let mut calls = Vec::new();
        let mut found = Vec::new();
        for group in &groups {
            let call = Paged::new(gpu, group, Paging::Scattered(page_size), selection)?;
            found.extend(group.rows_of(call.bits(gpu)?));
            calls.push(call);
        }
        same(Contender::Apart, &found, &problem.in_groups(&bits))?;
        records.push((Contender::Apart, Box::new(move |encoder| calls.iter().for_each(|call| call.encode(encoder)))));
    }
    let unfused: Result<Vec<Unfused>, _> = groups.iter().map(|group| Unfused::new(gpu, group)).collect();
    let no_unfused = match unfused {
        Ok(baselines) => {
            for (baseline, group) in baselines.iter().zip(&groups) {
                gpu.seconds(&|encoder| baseline.encode(encoder), 1)?;
                accuracy = accuracy.or_worse(baseline.accuracy(gpu, &Judge::new(group)?)?);
            }
            let record = move |encoder: &mut _| baselines.iter().for_each(|baseline| baseline.encode(encoder));
            records.push((Contender::Unfused, Box::new(record)));
            None
        }
        Err(BenchError::Shape { why, .. }) => Some(why),
        Err(error) => return Err(error),
    };
    let out = paged.out.clone();
    records.push((Contender::Paged, Box::new(move |encoder| paged.encode(encoder))));

    let mut entries = Vec::new();
    for (contender, record) in records {
        let repeats = gpu.repeats(&record, options.target_s)?;
        entries.push(Entry { contender, record, repeats });
    }
    entries.sort_by_key(|entry| entry.contender);
    let read = ReadRate::new(gpu, problem.kv_bytes(), options.target_s)?;
    let coverage = judge.coverage();
    let series = Series::default();
    let measured = Measured {
        kernel,
        compile_ms,
        stepped_down,
        choice,
        encode_us,
        accuracy,
        coverage,
        no_unfused,
        series,
        problem,
    };
    Ok(Timed { measured, entries, read, out, bits })
}

#[cfg(test)]
mod tests {
    use paged_attention_cases::{CaseSpec, Heads, Seq};

    use super::*;

    /// What is published follows from the rounds: ratios inside a round, shares best over best.
    #[test]
    fn figures_from_rounds() {
        let spec = CaseSpec::new("x", Heads::new(1, 1, 8), [(2, 2)]).causal(true);
        let decode = Problem::new(spec.clone().seqs(vec![Seq { q_len: 1, ..spec.seqs[0] }])).unwrap();
        let problem = Problem::new(spec).unwrap();
        let (flop, bytes) = (problem.flop(), problem.kv_bytes());
        let seconds = [
            (Contender::Paged, vec![1.0, 2.0, 4.0]),
            (Contender::Contiguous, vec![1.0, 1.0, 4.0]),
            (Contender::Unfused, vec![3.0, 8.0, 8.0]),
        ];
        let series = Series { seconds: seconds.into(), read_gbps: vec![1.0, 5.0, 2.0], read_pattern: String::new() };
        let mut measured = Measured {
            problem,
            kernel: String::new(),
            compile_ms: 0.0,
            stepped_down: Vec::new(),
            choice: None,
            encode_us: 0.0,
            accuracy: Accuracy { max_abs_error: 0.0, max_bound_ratio: 0.0 },
            coverage: (2, 2),
            no_unfused: None,
            series,
        };
        let limits = Limits { fma_gflops: vec![3.0, 10.0], ..Limits::default() };
        assert_eq!((measured.median_s(), measured.best_s()), (2.0, 1.0));
        assert_eq!(measured.ratio(Contender::Paged, Contender::Contiguous), Some(1.0));
        assert_eq!(measured.ratio(Contender::Unfused, Contender::Paged), Some(3.0));
        assert_eq!(measured.ratio(Contender::Paged, Contender::Apart), None);
        assert_eq!(measured.gflops(), 1e-9 * flop / 2.0);
        assert_eq!(measured.share(&limits), 1e-9 * (flop / 10.0) / 1.0);
        measured.problem = decode;
        assert_eq!(measured.share(&limits), 1e-9 * (bytes / 5.0) / 1.0);
    }
}
