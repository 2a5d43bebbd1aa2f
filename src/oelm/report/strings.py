"""Every word that a report shows, in English and in Chinese. Nothing that a reader sees is written anywhere else."""

from __future__ import annotations

from collections.abc import Callable

from ..analysis.run import AnalysisError

LANGUAGES = ("en", "zh")

# key: (English, Chinese). Names in braces are filled in, and are the same in both.
STRINGS: dict[str, tuple[str, str]] = {
    # The page
    "title": ("What the runs show", "实验结果"),
    "title_of": ("What the runs show: {dataset}", "实验结果：{dataset}"),
    "contents": ("Contents", "目录"),
    "theme": ("Dark / light", "深色 / 浅色"),
    "made_by": (
        "Made by oelm {version} from {runs} in {folders}. No number here was typed by hand.",
        "由 oelm {version} 根据 {folders} 中的 {runs}生成。本文中的数字均来自记录，没有手工填写。",
    ),
    "no_script": (
        "The pictures need JavaScript, which is in this file; the tables do not.",
        "图形需要 JavaScript（已包含在本文件中）；表格不需要。",
    ),
    "steps_axis": ("steps", "步数"),
    "seconds_axis": ("time", "时间"),
    "linear": ("linear", "线性"),
    "log": ("log", "对数"),
    "reset_zoom": ("hover or tap for values; tap a name to hide it", "悬停或点按查看数值；点按名称可隐藏"),
    # How pieces of text are put together
    "and_then": ("; ", "；"),
    "in_brackets": ("{text} ({more})", "{text}（{more}）"),
    "headed": ("{head}: {text}", "{head}：{text}"),
    "heading_of": ("{head}:", "{head}："),
    "one_run": ("1 run", "1 次运行"),
    "many_runs": ("{count} runs", "{count} 次运行"),
    "one_method": ("1 method", "1 种方法"),
    "many_methods": ("{count} methods", "{count} 种方法"),
    # Sections
    "summary": ("Summary", "摘要"),
    "what_holds": ("What holds", "成立"),
    "what_fails": ("What does not hold", "不成立"),
    "what_is_open": ("What is undecided", "尚无定论"),
    "what_differs": ("How the arms compare", "各方法对比"),
    "nothing": ("Nothing.", "无。"),
    "results": ("Results", "结果"),
    "hypotheses": ("Hypotheses", "假设检验"),
    "published": ("Published against measured", "已发表结果与实测结果"),
    "step_time": ("Step time", "单步时间"),
    "runs": ("Runs", "运行列表"),
    "left_out": ("Runs that are not counted", "未计入的运行"),
    "running": ("Runs still going", "进行中的运行"),
    "reading": ("How to read this", "阅读说明"),
    "equal_rates": ("At equal learning rates", "相同学习率下的对比"),
    "comparisons": ("Comparisons", "对比"),
    "missing": ("Not shown", "未展示"),
    # Summary sentences
    "counted": (
        "{runs} of {methods} counted; {left} left out ({kinds}).",
        "共计入 {methods}的 {runs}；{left} 次未计入（{kinds}）。",
    ),
    "counted_all": (
        "{runs} of {methods}, all counted.",
        "共 {methods}的 {runs}，全部计入。",
    ),
    "still_running": (
        "{runs} still going: shown in the curves and counted nowhere.",
        "{runs}仍在进行；只在曲线中显示，不计入统计。",
    ),
    "synthetic": (
        "{dataset}: synthetic, so it shows that the tools work and says little about real text.",
        "{dataset}：合成数据，只能说明工具可用，不能说明真实文本上的表现。",
    ),
    "stand_in": (
        "{dataset}: a stand-in is not the data set it stands for.",
        "{dataset}：替代数据不等于它所替代的数据集。",
    ),
    "no_reference": (
        "{dataset}: there is no baseline among the runs, so nothing is compared.",
        "{dataset}：运行中没有基线，因此不作对比。",
    ),
    "sentence": (
        "{arm} against {reference}: {measure} {change} ({interval}; {basis}). {verdict}",
        "{arm} 对比 {reference}：{measure} {change}（{interval}；{basis}）。{verdict}",
    ),
    "but": ("{sentence} But {doubts}.", "{sentence}但是：{doubts}。"),
    "sentence_on": ("On {dataset}: {sentence}", "{dataset}：{sentence}"),
    "basis_equal": ("both at learning rate {rate}", "学习率均为 {rate}"),
    "basis_best": (
        "each at its best learning rate of the same grid: {rate} and {reference_rate}",
        "各取同一学习率网格中的最优值：{rate} 与 {reference_rate}",
    ),
    "basis_confounded": (
        "learning rates {rate} and {reference_rate}, with no rate in common",
        "学习率 {rate} 与 {reference_rate}，没有共同的学习率",
    ),
    "says_better": ("Better, and not by chance.", "更好，且不是偶然。"),
    "says_worse": ("Worse, and not by chance.", "更差，且不是偶然。"),
    "says_alike": ("Alike within {margin}.", "在 {margin} 以内相当。"),
    "says_open": (
        "Undecided: these runs can tell neither a difference nor that there is none.",
        "尚无定论：这些运行既不能说明有差异，也不能说明没有差异。",
    ),
    "says_open_corrected": (
        "Undecided: taken alone the interval leaves zero out, but among the arms of this setup that may be "
        "chance (corrected p {p}).",
        "尚无定论：单独看区间不含零，但在该设置的多个方法中这可能是偶然（校正后 p {p}）。",
    ),
    "corrected_away": (
        "taken alone {towards}, but not among the hypotheses of this report (corrected p {p})",
        "单独看为{towards}，但在本报告的多项假设中不成立（校正后 p {p}）",
    ),
    "says_one_seed": ("No verdict from one seed.", "只有一个种子，不下结论。"),
    "says_confounded": ("No verdict: confounded by {fields}.", "不下结论：受 {fields} 混淆。"),
    "says_unpaired": ("No verdict: the two share no seed.", "不下结论：两者没有共同的种子。"),
    "verdict_line": ("{title}: {numbers}", "{title}：{numbers}"),
    "numbers_on": ("{numbers} ({where})", "{numbers}（{where}）"),
    # Verdicts
    "supported": ("supported", "支持"),
    "refuted": ("refuted", "否定"),
    "undecided": ("undecided", "尚无定论"),
    "agrees": ("agrees", "一致"),
    "differs": ("differs", "不一致"),
    "not-judged": ("not judged", "不作判断"),
    "better": ("better", "更好"),
    "worse": ("worse", "更差"),
    "alike": ("alike", "相当"),
    "within": ("{reading}, within {margin}", "{reading}，在 {margin} 以内"),
    "yes": ("yes", "是"),
    "no": ("no", "否"),
    # Intervals
    "interval": ("95 % interval {low} to {high}, {n} seeds", "95 % 区间 {low} 至 {high}，{n} 个种子"),
    "one_seed_short": ("one seed: no interval", "一个种子：无区间"),
    "too_noisy": ("too noisy to say, {n} seeds", "噪声过大，无法判断，{n} 个种子"),
    "no_pair_short": ("no common seed: no interval", "无共同种子：无区间"),
    "slope_interval": ("95 % interval {low} to {high}, {n} data sets", "95 % 区间 {low} 至 {high}，{n} 个数据集"),
    "per_doubling": ("{value} per doubling of the data", "数据每翻一倍 {value}"),
    "points": ("{value} points", "{value} 个百分点"),
    "beside": ("{measure} {value}, expected {expected}", "{measure}为 {value}，预期 {expected}"),
    # Columns
    "col_method": ("method", "方法"),
    "col_rate": ("learning rate", "学习率"),
    "col_seeds": ("seeds", "种子数"),
    "col_interval": ("95 % interval", "95 % 区间"),
    "col_trainable": ("trainable", "可训练参数"),
    "col_frozen": ("frozen", "冻结占比"),
    "col_step": ("step (ms)", "单步 (ms)"),
    "col_runs": ("runs", "运行"),
    "col_run": ("run", "运行"),
    "col_against": ("against", "对照"),
    "col_basis": ("basis", "依据"),
    "col_change": ("change", "变化"),
    "col_difference": ("difference", "差值"),
    "col_bootstrap": ("bootstrap", "自助法区间"),
    "col_p": ("p (Holm)", "p（Holm）"),
    "col_alike": ("within {margin}?", "相差在 {margin} 内？"),
    "col_reading": ("reading", "结论"),
    "col_hypothesis": ("hypothesis", "假设"),
    "col_rule": ("passes if", "通过条件"),
    "col_found": ("found", "结果"),
    "col_verdict": ("verdict", "判定"),
    "col_published": ("published", "已发表"),
    "col_measured": ("measured", "实测"),
    "col_figure": ("figure", "指标"),
    "col_published_change": ("published change", "已发表变化"),
    "col_measured_change": ("measured change", "实测变化"),
    "col_setup": ("set-up: published → here", "设置：已发表 → 本次"),
    "col_folder": ("folder", "目录"),
    "col_id": ("config id", "配置 id"),
    "col_seed": ("seed", "种子"),
    "col_steps": ("steps", "步数"),
    "col_device": ("device", "设备"),
    "col_why": ("why", "原因"),
    "col_kind": ("what", "类别"),
    "col_flops": ("FLOP bound", "FLOP 下界"),
    "col_ratio": ("ratio", "比值"),
    "col_rounds": ("rounds", "轮数"),
    "col_token": ("token (ms)", "每词元（毫秒）"),
    "col_cache": ("cache (bytes a token)", "缓存（字节/词元）"),
    "col_cache_ratio": ("cache, ratio", "缓存比值"),
    "col_step_of": ("model of step", "模型所在步数"),
    "col_step_now": ("step", "当前步"),
    "col_latest": ("latest", "最新值"),
    "col_split": ("split", "数据划分"),
    "other_splits": ("Other labelled splits", "其他有标注的数据划分"),
    "other_splits_about": (
        "Figures on splits that nothing was chosen on, of each run's best model where that was kept and else of its "
        "last one; means over seeds.",
        "在未参与任何选择的数据划分上的指标：取各运行保存的最佳模型，未保存则取最后的模型；种子平均。",
    ),
    "run_notes": ("What the runs' records note", "运行记录中的备注"),
    "m_chrf": ("chrF", "chrF 得分"),
    "m_bleu": ("BLEU", "BLEU 得分"),
    # Bases in tables
    "basis_equal_short": ("equal rate", "相同学习率"),
    "basis_best_short": ("best rates", "各自最优学习率"),
    "basis_confounded_short": ("confounded", "受混淆"),
    # Rules
    "rule_within": ("|{what}| < {bound}", "|{what}| < {bound}"),
    "rule_at_most": ("{what} ≤ {bound}", "{what} ≤ {bound}"),
    "rule_at_least": ("{what} ≥ {bound}", "{what} ≥ {bound}"),
    "rule_above": ("{what} > {bound}", "{what} > {bound}"),
    "rule_below": ("{what} < {bound}", "{what} < {bound}"),
    "rule_what": ("{measure} of {arm} against {against}", "{arm} 相对 {against} 的{measure}"),
    "rule_what_value": ("{measure} of {arm}", "{arm} 的{measure}"),
    "rule_what_trend": (
        "slope of that change by data size, {arm} against {against}",
        "{arm} 相对 {against} 的变化随数据量的斜率",
    ),
    # Scenarios of the plan
    "scenario_title": ("The plan's scenario", "计划中的情景"),
    "scenario_better": (
        "Freeze is better than no-freeze. The plan's follow-up: take it to larger models, with the same grid of rates.",
        "Freeze 优于 no-freeze。计划的后续：推广到更大的模型，使用相同的学习率网格。",
    ),
    "scenario_like": (
        "Freeze is like no-freeze. The plan's follow-up: improve the implementation, so that the saving is real; what "
        "is lost against the baseline, if anything, comes from the orthogonal start and not from freezing.",
        "Freeze 与 no-freeze 相当。计划的后续：优化实现，使节省真正兑现；若仍不及基线，原因在于正交初始化而非冻结。",
    ),
    "scenario_worse": (
        "Freeze is worse than no-freeze. The plan's follow-up: find the reason. Freezing itself costs; give part of it "
        "back (a trained core, the first layers trained, one of Q and K only).",
        "Freeze 劣于 no-freeze。计划的后续：分析原因。代价来自冻结本身；可放开一部分"
        "（可训练的 core、放开前几层、只冻结 Q 或 K）。",
    ),
    "scenario_none": (
        "These runs select none of the plan's three scenarios (freeze better than, like or worse than no-freeze).",
        "这些运行不足以选出计划中的三种情景之一（freeze 优于、相当于或劣于 no-freeze）。",
    ),
    # Notes
    "note_one_seed": ("one seed: no interval, never a verdict", "只有一个种子：没有区间，不下结论"),
    "note_no_runs": ("no runs of these arms", "没有这些方法的运行"),
    "note_too_small": (
        "about models of at least {parameters} parameters, and these are smaller",
        "针对至少 {parameters} 个参数的模型，而这些模型较小",
    ),
    "note_pretrained": (
        "about models that start from nothing, and these are pretrained",
        "针对从零开始训练的模型，而这些模型是预训练的",
    ),
    "note_few_datasets": (
        "a trend needs three data sets; there are {count}",
        "趋势至少需要三个数据集；现有 {count} 个",
    ),
    "note_confounded": ("confounded by {fields}", "受 {fields} 混淆"),
    "seeds_left": ("{left} of {all}", "{left}/{all}"),
    "seeds_left_note": (
        "the other seeds stayed at chance or diverged and are in no figure: what is left flatters the arm",
        "其余种子停在随机水平或已发散，未计入任何数值：剩下的结果偏向该方法",
    ),
    "note_no_ratio": ("a figure of zero has no relative change", "数值为零，没有相对变化"),
    "note_no_common_seed": ("the two arms share no seed", "两者没有共同的种子"),
    "note_unpaired": (
        "not in the difference, since the other arm has no counted run of the seed: {count} of the runs",
        "{count} 次运行因另一方法没有相同种子而未计入差值",
    ),
    "note_one_rate": ("only the rate {rate} was run in both arms", "两种方法只共同运行了学习率 {rate}"),
    "note_better_elsewhere": (
        "{arm} does better at {rate}, where the other arm was not run",
        "{arm} 在 {rate} 下更好，但另一方法没有在该学习率下运行",
    ),
    "note_no_seed_at_every_rate": (
        "no seed was run at every rate, so no best rate is chosen",
        "没有一个种子在所有学习率下都运行过，因此不选最优学习率",
    ),
    "note_grid": (
        "rates {rates}, each judged on the same seeds (n = {seeds})",
        "学习率 {rates}，均用相同的种子评判（n = {seeds}）",
    ),
    "note_edge_low": (
        "{arm} is best at the lowest rate of its grid ({rate}): a lower one may be better",
        "{arm} 的最优值位于网格最低端（{rate}）：更低的学习率可能更好",
    ),
    "note_edge_high": (
        "{arm} is best at the highest rate of its grid ({rate}): a higher one may be better",
        "{arm} 的最优值位于网格最高端（{rate}）：更高的学习率可能更好",
    ),
    "note_times_doubtful": (
        "their records say that their step times must not be compared",
        "其记录注明单步时间不可比较",
    ),
    "note_uneven_times": (
        "the step times of {arm}'s seeds differ {factor}-fold: was the machine busy with something else?",
        "{arm} 各种子的单步时间相差 {factor} 倍：机器当时是否在忙别的？",
    ),
    "note_no_spread": (
        "every pair differs by the same amount, to the last digit: are these independent runs?",
        "每一对的差值完全相同：这些运行是否相互独立？",
    ),
    "note_cautions": ("also different: {fields}", "另有不同：{fields}"),
    "note_old_config": (
        "written by another version of oelm; its config was taken as it stands",
        "由另一版本的 oelm 写成；按原样读取其配置",
    ),
    "note_stand_in": ("stand-in data", "替代数据"),
    "note_doubt": ("doubt: {text}", "疑点：{text}"),
    # Left out
    "kind_damaged": ("damaged", "损坏"),
    "kind_failed": ("failed", "失败"),
    "kind_cut": ("cut", "中断"),
    "kind_unfinished": ("unfinished", "未完成"),
    "kind_at-chance": ("at chance", "随机水平"),
    "kind_diverged": ("diverged", "发散"),
    "kind_duplicate": ("duplicate", "重复"),
    "why_cut": ("stopped at step {step} of {steps}", "在第 {step} 步（共 {steps} 步）中断"),
    "why_unfinished": ("it has no result.json", "没有 result.json"),
    "why_at-chance": (
        "accuracy {accuracy}; the commonest class alone gives {majority}",
        "准确率 {accuracy}；始终回答最常见类别即可得 {majority}",
    ),
    "why_diverged": (
        "its last validation loss is not a number, or its perplexity none that can be averaged",
        "最后一次验证损失不是数值，或其困惑度大到无法平均",
    ),
    "why_duplicate": ("the same settings and seed as {other}", "与 {other} 的设置和种子相同"),
    # Measures
    "m_perplexity": ("perplexity", "困惑度"),
    "m_best_perplexity": ("best perplexity", "最佳困惑度"),
    "m_val_loss": ("validation loss", "验证损失"),
    "m_best_val_loss": ("best validation loss", "最佳验证损失"),
    "m_bits_per_byte": ("bits per byte", "每字节比特数"),
    "m_accuracy": ("accuracy", "准确率"),
    "m_best_accuracy": ("best accuracy", "最佳准确率"),
    "m_macro_f1": ("macro F1", "宏平均 F1"),
    "m_matthews": ("Matthews correlation", "Matthews 相关系数"),
    "m_exact_match": ("exact match", "完全匹配率"),
    "m_step_seconds": ("step time", "单步时间"),
    "m_steps_per_hour": ("steps per hour", "每小时步数"),
    "m_seconds": ("training time", "训练时间"),
    "m_peak_memory": ("peak memory", "峰值显存"),
    "m_frozen": ("frozen parameters", "冻结参数量"),
    "m_frozen_share": ("frozen share", "冻结占比"),
    "m_trainable": ("trainable parameters", "可训练参数量"),
    "m_best_epoch": ("best epoch", "最佳轮次"),
    "m_perplexity_at_step_3000": ("perplexity at step 3,000", "第 3,000 步的困惑度"),
    # Figures
    "fig_change": ("Change against {reference}", "相对 {reference} 的变化"),
    "cap_change": (
        "{measure} of each arm against {reference}, with 95 % paired t intervals. A hollow mark has no interval "
        "(one seed, or too much noise to say), or is confounded.",
        "各方法相对 {reference} 的{measure}变化及 95 % 配对 t 区间。"
        "空心标记表示没有区间（只有一个种子，或噪声过大）或受混淆。",
    ),
    "fig_validation": ("Validation during training", "训练过程中的验证指标"),
    "cap_validation": (
        "{measure} on the validation data over steps and over wall-clock time. Lines are means over seeds, bands run "
        "from the lowest to the highest seed.",
        "验证集{measure}随步数和时间的变化。曲线为各种子的平均，色带为种子间的最小值到最大值。",
    ),
    "fig_training": ("Training loss and learning rate", "训练损失与学习率"),
    "cap_training": (
        "Training loss (mean over seeds; bands from lowest to highest) and the learning rate.",
        "训练损失（种子平均；色带为最小值到最大值）与学习率。",
    ),
    "fig_parameters": ("{measure} against trainable parameters", "{measure}与可训练参数量"),
    "cap_parameters": (
        "Each arm at the rate at which it is shown; bars are 95 % intervals over seeds.",
        "各方法取其展示的学习率；误差条为种子间的 95 % 区间。",
    ),
    "fig_time": ("Step time by arm", "各方法的单步时间"),
    "cap_time": (
        "Median time of whole optimiser steps, with the range from the 10th to the 90th percentile; dots are single "
        "steps, up to twice the latter. The cross is the time that the FLOPs alone would give, taking {reference} as "
        "the measure.",
        "完整优化步的时间中位数，横条为第 10 至第 90 百分位，小点为单步（至后者的两倍为止）。"
        "叉号为仅按 FLOP 推算的时间，以 {reference} 为准。",
    ),
    "cap_time_doubt": (
        "The records of some of these runs say that their step times must not be compared.",
        "其中部分运行的记录注明单步时间不可比较。",
    ),
    "fig_target": ("Time to target", "达到目标所需时间"),
    "cap_target": (
        "When each arm first reached a {measure} (mean over its seeds, where all of them did), by steps and by time.",
        "各方法首次达到某一{measure}的步数和时间（所有种子均达到时取平均）。",
    ),
    "fig_sweep": ("Learning-rate sweep", "学习率扫描"),
    "cap_sweep": (
        "Final {measure} by learning rate; lines join means over seeds, bands run from the lowest to the highest.",
        "最终{measure}随学习率的变化；曲线连接种子平均值，色带为最小值到最大值。",
    ),
    "fig_map": ("What is frozen where", "各层冻结情况"),
    "cap_panels": ("Shown: the first {shown} of {all} methods.", "仅显示 {all} 种方法中的前 {shown} 种。"),
    "cap_map": (
        "Every matrix by layer and role: the share of its parameters that is frozen. A dash is an identity: no matrix.",
        "按层和角色列出每个矩阵中被冻结的参数占比。短横线表示恒等映射：没有矩阵。",
    ),
    "fig_entropy": ("Attention entropy by layer", "各层注意力熵"),
    "cap_entropy": (
        "Entropy of the attention weights as a share of the largest possible, by layer and step (mean over seeds).",
        "各层注意力权重的熵占最大可能值的比例随训练的变化（种子平均）。",
    ),
    "fig_logits": ("Attention logit scale by layer", "各层注意力 logit 尺度"),
    "cap_logits": (
        "Standard deviation of the attention logits, by layer, over training (mean over seeds).",
        "各层注意力 logit 的标准差随训练的变化（种子平均）。",
    ),
    "fig_accuracy": ("{measure} by arm", "各方法的{measure}"),
    "cap_accuracy": (
        "Mean over seeds with 95 % t intervals; small dots are single runs. The dashed line is the commonest class.",
        "种子平均及 95 % t 区间；小点为单次运行。虚线为始终回答最常见类别。",
    ),
    "fig_confusion": ("Confusion matrices", "混淆矩阵"),
    "cap_confusion": (
        "Rows are the truth, columns the answer; shares of each row, summed over seeds, of the last epoch.",
        "行为真实类别，列为预测类别；数值为每行的占比，对种子求和，取最后一轮。",
    ),
    "axis_entropy": ("entropy / largest possible", "熵 / 最大可能值"),
    "axis_logits": ("standard deviation of logits", "logit 标准差"),
    "axis_steps": ("optimiser steps", "优化步数"),
    "axis_seconds": ("seconds", "秒"),
    "axis_step_ms": ("milliseconds per step", "毫秒 / 步"),
    "axis_loss": ("training loss", "训练损失"),
    "axis_rate": ("learning rate", "学习率"),
    "axis_change": ("change of {measure} against {reference} (%)", "相对 {reference} 的{measure}变化（%）"),
    "axis_points": ("difference of {measure} to {reference} (points)", "与 {reference} 的{measure}之差（百分点）"),
    "axis_truth": ("truth", "真实"),
    "axis_answer": ("answer", "预测"),
    "axis_layer": ("layer", "层"),
    "axis_role": ("role", "角色"),
    "series_running": ("{method}, seed {seed}, running", "{method}，种子 {seed}，进行中"),
    "flop_bound": ("FLOP bound", "FLOP 下界"),
    "commonest": ("commonest class", "最常见类别"),
    "missing_validation": ("validation curves: no run has more than one validation", "验证曲线：没有运行包含多次验证"),
    "missing_sweep": (
        "learning-rate sweep: no arm was run at more than one rate",
        "学习率扫描：没有方法运行过多个学习率",
    ),
    "missing_target": (
        "time to target: the runs set no eval.targets that more than one arm reached",
        "达到目标所需时间：没有两种以上方法都达到的 eval.targets",
    ),
    "missing_time": ("step times: the records hold none", "单步时间：记录中没有"),
    "missing_attention": (
        "attention entropy and logit scale: the records hold no attention lines",
        "注意力熵与 logit 尺度：记录中没有 attention 行",
    ),
    "missing_map": ("parameter map: the records hold no audit", "冻结分布图：记录中没有 audit"),
    "missing_confusion": ("confusion matrices: the records hold none", "混淆矩阵：记录中没有"),
    # Step time section
    "time_intro": (
        "Freezing removes the products that make a matrix's own gradient, an identity the matrix as a whole. The bound "
        "is the share of a step's FLOPs that is left; memory traffic may save a little more.",
        "冻结省去计算矩阵自身梯度的乘法，恒等映射省去整个矩阵。下界为一步中剩余 FLOP 的占比；访存可能再省一点。",
    ),
    "time_bench": (
        "Measured side by side with oelm bench, arms interleaved; ratios are of medians within a round, and their mean "
        "over the rounds ({file}):",
        "用 oelm bench 交错实测；比值为同一轮内中位数之比，再对各轮取平均（{file}）：",
    ),
    "time_decoding": (
        "Generation, measured with oelm bench --decode, arms interleaved: one token after {context} others in "
        "batches of {batch}{how} ({file}):",
        "用 oelm bench --decode 交错实测的生成：批大小 {batch}，在 {context} 个词元之后生成一个词元{how}（{file}）：",
    ),
    "time_compiled": (", compiled", "，经编译"),
    "time_bench_unequal": (
        "Steps of {arm} have batches of {batch}, unlike those it is measured by: its ratio compares steps of different "
        "size and says nothing about speed. Per example its ratio is {ratio}.",
        "{arm} 每步批量为 {batch}，与基准不同：所比为大小不同的步，不能说明速度。按每个样本计，比值为 {ratio}。",
    ),
    "time_runs": ("From the runs themselves:", "来自各运行自身的计时："),
    "time_excluded": (
        "Comparisons of step times that are left out: {count} ({why}).",
        "{count} 个单步时间对比未列出：{why}。",
    ),
    # Reading
    "read_pairs": (
        "Arms are paired by seed: with the same seed they saw the same data in the same order and started from the "
        "same weights wherever the method leaves them alone. The figure is that of the last validation.",
        "各方法按种子配对：同一种子意味着相同的数据、相同的顺序，以及方法未改动之处相同的初始权重。指标取最后一次验证。",
    ),
    "read_ratio": (
        "Changes of perplexity and of times are ratios, analysed on the log scale (for perplexity: differences of the "
        "loss); accuracies are compared in points. Intervals are 95 % paired t intervals, each for itself. From "
        "{pairs} pairs on there is a BCa bootstrap interval beside it ({resamples} resamples).",
        "困惑度和时间的变化为比值，在对数尺度上分析（困惑度即损失之差）；准确率以百分点比较。"
        "区间为 95 % 配对 t 区间，各自独立。配对数不少于 {pairs} 时另给 BCa 自助法区间（{resamples} 次重采样）。",
    ),
    "read_holm": (
        "p-values are corrected by Holm's method over all arms of a setup, those of the hypotheses over all "
        "hypotheses. A difference is called one where the corrected p is under 0.05.",
        "p 值用 Holm 方法在同一设置的全部方法中校正，假设的 p 值在全部假设中校正。校正后 p 小于 0.05 才称为有差异。",
    ),
    "read_tost": (
        "Two arms are called alike when two one-sided tests (TOST), corrected in the same way, show them within the "
        "margin: 5 % of perplexity, 1 point of accuracy. No difference found is not the same as alike.",
        "只有当双单侧检验（TOST，同样校正）表明两者之差在界限内（困惑度 5 %，准确率 1 个百分点）时才称为相当。"
        "“未发现差异”不等于“相当”。",
    ),
    "read_rates": (
        "The best rate of an arm is chosen on the validation figure among the rates that both arms were run at, over "
        "the same seeds at each. With one seed there is a number and never a verdict.",
        "最优学习率在两种方法都运行过的学习率中、用相同种子按验证指标选出。只有一个种子时只给数值，不下结论。",
    ),
    "read_confounded": (
        "A comparison whose arms differ in more than the method is marked as confounded with the fields named, and "
        "gets no verdict. Runs that failed, were cut, diverged or learnt nothing are listed and averaged nowhere.",
        "若两种方法除方法外还有其他不同，则标为受混淆并列出字段，不下结论。"
        "失败、中断、发散或处于随机水平的运行只列出，不计入平均。",
    ),
    # Terminal
    "cli_two": ("{one}  against  {other}", "{one}  对比  {other}"),
    "cli_one_pair": (
        "two runs: no interval. oelm report compares arms with several seeds",
        "只有两次运行：没有区间。oelm report 用多个种子对比",
    ),
    "cli_same": ("they differ in the method only", "两者只有方法不同"),
    "cli_identical": ("they differ in nothing: the same method and settings", "两者没有不同：方法和设置相同"),
    "cli_confounded": ("confounded: besides the method they differ in", "受混淆：除方法外还有以下不同"),
    "cli_cautions": ("also different, seldom of weight", "另有不同，通常影响不大"),
    "cli_method": ("the method", "方法"),
    "cli_tasks": (
        "{one} is of task {task}, {other} of task {other_task}: runs of different tasks are not compared",
        "{one} 的任务是 {task}，{other} 的任务是 {other_task}：不同任务的运行不作对比",
    ),
    "wrote": ("wrote {path}", "已写入 {path}"),
    "watching": (
        "refreshing every {seconds} s until all runs are done; Ctrl-C ends it",
        "每 {seconds} 秒刷新，直到全部运行结束；按 Ctrl-C 退出",
    ),
    "waiting": ("no runs yet: waiting", "还没有运行：等待中"),
    "refreshed": ("refreshed: {done} done, {running} running", "已刷新：{done} 完成，{running} 进行中"),
    "no_matplotlib": (
        "no figures were written: they need matplotlib (pip install 'oelm[report]')",
        "未生成图形：需要 matplotlib（pip install 'oelm[report]'）",
    ),
    "no_typst": (
        "report.pdf was not written: it needs typst (pip install 'oelm[report]')",
        "未生成 report.pdf：需要 typst（pip install 'oelm[report]'）",
    ),
    "no_cjk": (
        "report.pdf was not written: Chinese needs a CJK font, and none was found. Debian and Ubuntu: apt install "
        "fonts-noto-cjk; Fedora: dnf install google-noto-sans-cjk-fonts; or put a font file into a folder and name it "
        "in OELM_FONTS",
        "未生成 report.pdf：中文需要 CJK 字体，但没有找到。Debian/Ubuntu：apt install fonts-noto-cjk；"
        "Fedora：dnf install google-noto-sans-cjk-fonts；或将字体文件放入目录并用 OELM_FONTS 指定",
    ),
    "figures_in_english": (
        "the labels in the figures are English: matplotlib found no CJK font (apt install fonts-noto-cjk)",
        "图中文字为英文：matplotlib 没有找到 CJK 字体（apt install fonts-noto-cjk）",
    ),
    "pdf_failed": ("report.pdf was not written: {why}", "未生成 report.pdf：{why}"),
}

Words = Callable[..., str]


def words(language: str) -> Words:
    """A function from a key and its values to text in a language."""
    if language not in LANGUAGES:
        raise AnalysisError(f"language {language!r}: use one of {', '.join(LANGUAGES)}")
    column = LANGUAGES.index(language)

    def say(key: str, **values: object) -> str:
        text = STRINGS[key][column]
        return text.format(**values) if values else text

    return say
