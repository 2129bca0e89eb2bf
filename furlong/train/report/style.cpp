#include "furlong/train/report/style.h"

namespace furlong::report {

const char kStyle[] = R"(
:root{color-scheme:light dark;--bg:#fdfdfc;--card:#fff;--fg:#1d2127;--muted:#666d78;--rule:#e3e5e8;--grid:#eceef0;
--band:#f4f5f6;--s1:#2c6bb0;--s2:#d2691e;--s3:#3b8c5a;--s4:#8458ad;--s5:#b5446a;--s6:#7d7460;--bad:#c22f2f}
@media(prefers-color-scheme:dark){:root{--bg:#14171b;--card:#1a1e23;--fg:#e4e7ea;--muted:#98a1ab;--rule:#2d333a;
--grid:#272c33;--band:#1f242a;--s1:#6aa7ea;--s2:#ef9a57;--s3:#6cc290;--s4:#b896de;--s5:#e887a6;--s6:#b5ab93;--bad:#ff7b72}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",
Arial,sans-serif;font-variant-numeric:tabular-nums;-webkit-text-size-adjust:100%}
main{max-width:1120px;margin:0 auto;padding:36px 24px 60px}
h1{font-size:27px;line-height:1.2;font-weight:650;margin:0;letter-spacing:-.01em;overflow-wrap:anywhere}
h2{font-size:18px;font-weight:650;margin:44px 0 14px;padding-top:14px;border-top:1px solid var(--rule)}
h3{font-size:14.5px;font-weight:600;margin:0}
p{margin:4px 0 0}
.lead,.note-text,footer{color:var(--muted)}
.lead{margin-top:6px}
.tiles{display:grid;grid-template-columns:repeat(4,1fr);gap:12px;margin:24px 0 0;padding:0}
.tile{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:12px 14px}
.tile b{display:block;font-size:22px;line-height:1.25;font-weight:600;letter-spacing:-.01em}
.tile span{display:block;color:var(--muted);font-size:12.5px;line-height:1.35}
.figures{display:grid;grid-template-columns:1fr 1fr;gap:18px}
figure{margin:0;grid-column:1/-1;background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:16px;min-width:0}
figure.half{grid-column:auto}figure.tall{grid-row:span 2}
.note-text{font-size:13px;line-height:1.45;max-width:76ch}
.legend{display:flex;flex-wrap:wrap;gap:2px 16px;align-items:center;color:var(--muted);font-size:12.5px;margin-top:8px}
.legend span{display:inline-flex;align-items:center;gap:6px}
.swatch{width:16px;height:0;border-top:3px solid;border-radius:2px}
.swatch.thin{border-top-width:1px;opacity:.6}
.swatch.dashed{border-top:2px dashed}
.dot{width:8px;height:8px;border-radius:50%;background:var(--s2)}
.dot.severe{background:var(--bad)}
.key{width:12px;height:12px;border:1.5px solid var(--fg);border-radius:2px}
.ramp{width:110px;height:10px;border:1px solid var(--rule);border-radius:2px}
.ramp.share{background:linear-gradient(90deg,transparent,var(--s1))}
.ramp.ratio{background:linear-gradient(90deg,var(--s1),transparent,var(--s2))}
.picture{margin-top:8px}
.phone{display:none}
svg{display:block;width:100%;height:auto;overflow:visible}
svg text{font-size:11px;fill:var(--muted);font-family:inherit}
svg .value{font-size:10px;fill:var(--fg)}
svg .value.on{fill:var(--card)}
svg .strong{fill:var(--fg);font-size:12px}
.grid{stroke:var(--grid)}.axis{stroke:var(--muted)}.border{stroke:var(--muted);stroke-dasharray:2 3;opacity:.7}
.reference{stroke:var(--muted);stroke-dasharray:5 4}
.band{fill:var(--band)}.field{fill:var(--band)}
.curve,.faint,.dashed{fill:none;stroke-width:1.8;stroke-linejoin:round;stroke-linecap:round}
.faint{stroke-width:1;opacity:.38}.dashed{stroke-dasharray:5 4}
.mark{fill:var(--s2);stroke:var(--card);stroke-width:1}.mark.severe{fill:var(--bad)}
.frame{fill:none;stroke:var(--fg);stroke-width:1.2;opacity:.75}
.panels{display:grid;grid-template-columns:repeat(auto-fill,minmax(215px,1fr));gap:14px 18px;margin-top:12px}
.panels h4{margin:0 0 3px;font-size:12.5px;font-weight:600;display:flex;justify-content:space-between;gap:8px}
.panels h4 span{color:var(--muted);font-weight:400}
.switch{float:right;display:inline-flex;border:1px solid var(--rule);border-radius:6px;overflow:hidden;font-size:12.5px}
.switch label{padding:2px 10px;cursor:pointer;color:var(--muted)}
.choice{position:absolute;opacity:0;pointer-events:none}
.choice.a:checked~.switch .a,.choice.b:checked~.switch .b{background:var(--band);color:var(--fg);font-weight:600}
.choice:focus-visible~.switch{outline:2px solid var(--s1)}
.choice.a:checked~.view.b,.choice.b:checked~.view.a{display:none}
.scroll{overflow-x:auto;margin-top:14px}
table{border-collapse:collapse;width:100%;font-size:13.5px}
th{font-weight:500;color:var(--muted);text-align:right}
td{text-align:right}
th,td{padding:5px 10px;border-bottom:1px solid var(--rule);white-space:nowrap}
th:first-child,td:first-child{text-align:left;padding-left:0}
tr:last-child td{border-bottom:0}
.samples{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(340px,100%),1fr));gap:18px}
blockquote{margin:0;background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:16px 18px;
font-family:Georgia,"Times New Roman",serif;font-size:15.5px;line-height:1.6;white-space:pre-wrap;overflow-wrap:anywhere}
blockquote b{font-weight:700}
blockquote footer{font:12.5px system-ui,sans-serif;margin:10px 0 0;padding:0;border:0}
.missing{color:var(--muted);margin:6px 0;overflow-wrap:anywhere}.missing b{color:var(--fg);font-weight:600}
code{font:.92em ui-monospace,Menlo,Consolas,monospace;overflow-wrap:anywhere}
footer{margin-top:40px;padding-top:14px;border-top:1px solid var(--rule);font-size:13px}
@media(max-width:760px){main{padding:22px 14px 40px}h1{font-size:23px}.figures{grid-template-columns:1fr;gap:14px}
figure.half{grid-column:1/-1;grid-row:auto}.wide{display:none}.phone{display:block}figure{padding:12px}
.tiles{grid-template-columns:1fr 1fr;gap:10px}.tile b{font-size:19px}.panels{grid-template-columns:1fr 1fr;gap:12px}}
@media print{.switch{display:none}figure,blockquote{break-inside:avoid}}
)";

}  // namespace furlong::report
