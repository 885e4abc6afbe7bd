"""The page's style: light and dark as the reader's system is, and a form for paper."""

LIGHT = """
--paper:#fbfbfa; --card:#ffffff; --ink:#1d2127; --soft:#5c6570; --rule:#dfe2e6; --grid:#eceef0;
--warn:#9a3412; --warn-back:#fff3e8;
--c0:#3b55d6; --c1:#c2410c; --c2:#0f8a5f; --c3:#a1217a; --c4:#8a6d00; --c5:#0b7fab; --c6:#6d4bc3;
--c7:#5b6470;
"""
DARK = """
--paper:#14171b; --card:#1b1f25; --ink:#e8eaed; --soft:#9aa4b0; --rule:#323942; --grid:#262c34;
--warn:#fdba74; --warn-back:#3a2618;
--c0:#8da2ff; --c1:#ff9a62; --c2:#4fd3a1; --c3:#f08fd0; --c4:#e3c64a; --c5:#5cc8f0; --c6:#bda4ff;
--c7:#b4bdc8;
"""
_COLOURS = "".join(f".c{n}{{--line:var(--c{n})}}" for n in range(8))
CSS = f"""
:root{{color-scheme:light dark;{LIGHT}}}
@media (prefers-color-scheme:dark){{:root{{{DARK}}}}}
*{{box-sizing:border-box}}
body{{margin:0;background:var(--paper);color:var(--ink);
 font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}}
main{{max-width:1240px;margin:0 auto;padding:28px 24px 60px}}
h1{{font-size:26px;line-height:1.2;margin:0 0 4px}}
h2{{font-size:19px;margin:38px 0 6px;padding-top:14px;border-top:1px solid var(--rule)}}
h3{{font-size:15px;margin:22px 0 6px}}
p{{margin:4px 0 10px;max-width:85ch}}
.soft{{color:var(--soft)}}
code{{font:13px ui-monospace,"DejaVu Sans Mono",monospace;overflow-wrap:anywhere}}
.scroll{{overflow-x:auto}}
table{{border-collapse:collapse;margin:8px 0 4px;font-variant-numeric:tabular-nums;font-size:14px}}
th,td{{text-align:left;padding:5px 16px 5px 0;border-bottom:1px solid var(--rule);
 vertical-align:top}}
thead th{{border-bottom:2px solid var(--rule);white-space:nowrap}}
th[scope=row]{{font-weight:500}}
th:first-child,td:first-child,td:not(.number){{min-width:17ch}}
td.number,th.number{{text-align:right;white-space:nowrap}}
td .soft{{font-size:12.5px}}
.warn{{color:var(--warn);font-weight:600}}
.note{{background:var(--warn-back);border-left:4px solid var(--warn);padding:8px 14px;
 margin:12px 0;max-width:none}}
.note ul{{margin:4px 0;padding-left:20px}}
.charts{{display:grid;grid-template-columns:repeat(auto-fill,minmax(330px,1fr));gap:16px}}
figure{{margin:0;padding:12px 14px 8px;background:var(--card);border:1px solid var(--rule);
 border-radius:8px;break-inside:avoid}}
figcaption b{{font-size:14.5px}}
figcaption p{{font-size:12.5px;line-height:1.4;color:var(--soft);margin:1px 0 6px}}
.legend{{display:flex;flex-wrap:wrap;gap:4px 20px;margin:2px 0 12px;font-size:14px;padding:0;
 list-style:none}}
.legend svg{{width:34px;height:10px;vertical-align:middle;margin-right:6px}}
figure svg{{display:block;width:100%;height:auto}}
.tick{{font:11px system-ui,"DejaVu Sans",sans-serif;fill:var(--soft)}}
.grid{{stroke:var(--grid)}} .axis{{stroke:var(--soft)}}
{_COLOURS}
.line{{fill:none;stroke:var(--line);stroke-width:1.9;stroke-linejoin:round}}
.band{{fill:var(--line);opacity:.15}}
.mark{{fill:var(--line);opacity:0}} .mark:hover,.mark.lone{{opacity:1}}
details{{margin:10px 0}} summary{{cursor:pointer;color:var(--soft)}}
@media print{{
 :root{{color-scheme:light;{LIGHT}--paper:#fff}}
 body{{font-size:11px}} code,figcaption p,td .soft{{font-size:9.5px}}
 main{{max-width:none;padding:0}}
 h1{{font-size:18px}} h2{{font-size:14px}} h3,figcaption b{{font-size:11.5px}}
 .legend{{font-size:10.5px}} .charts{{grid-template-columns:repeat(3,1fr);gap:8px}}
 table{{font-size:10.5px}}
 h2{{margin-top:18px;break-after:avoid}} tr{{break-inside:avoid}} .scroll{{overflow:visible}}
}}
"""
